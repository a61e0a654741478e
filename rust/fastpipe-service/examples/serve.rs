//! Serves numbers, for a try by hand.
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use fastpipe_service::grpc::{Code, Status};
use fastpipe_service::server::{Limits, Outlet, Server, Service};

struct Numbers(Bytes);

impl Service for Numbers {
    fn admit(&self, authorization: Option<&[u8]>) -> Result<(), Status> {
        match authorization {
            Some(b"Bearer wrong") => Err(Status::new(Code::Unauthenticated, "this server wants a token")),
            _ => Ok(()),
        }
    }
    fn get(&self, ticket: &[u8], _: SocketAddr, outlet: &Outlet) -> Result<(), Status> {
        let count: u64 = std::str::from_utf8(ticket)
            .ok()
            .and_then(|text| text.parse().ok())
            .unwrap_or(0);
        for number in 0..count {
            outlet.send(Some(&number.to_le_bytes()), self.0.clone())?;
        }
        Ok(())
    }
    fn act(&self, kind: &str, body: &[u8], client: SocketAddr) -> Result<Vec<Vec<u8>>, Status> {
        match kind {
            "health" => Ok(vec![format!("{client} {}", body.len()).into_bytes()]),
            _ => Err(Status::new(
                Code::InvalidArgument,
                format!("there is no action {kind:?} — 100 %"),
            )),
        }
    }
    fn actions(&self) -> &[(&str, &str)] {
        &[("health", "whether it takes requests")]
    }
}

fn main() {
    let limits = Limits {
        calls: 64,
        request: 64 << 10,
    };
    let data: Vec<u8> = (0..(512usize << 10)).map(|i| i as u8).collect();
    let mut server = Server::start(([127, 0, 0, 1], 7778).into(), limits, Numbers(data.into())).unwrap();
    println!("{}", server.address());
    std::thread::sleep(Duration::from_secs(60));
    println!("{}", server.stop(Duration::from_secs(1)));
}
