//! A process that has no descriptor left: by itself, since the limit is the process's.
#![cfg(target_os = "linux")]

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use fastpipe_intake::Intake;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn connections_are_looked_at_when_all_descriptors_are_taken() {
    let intake = Intake::new(1 << 20, 1 << 20);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    intake.watch(address.port()).unwrap();
    let mut client = TcpStream::connect(address).unwrap();
    let mut server = listener.accept().unwrap().0;

    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: Some(100),
            maximum,
        },
    )
    .unwrap();
    let taken: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    assert!(taken.len() > 50 && std::fs::read_dir("/proc/self/fd").is_err());

    // Until it is closed, or has sent too much.
    let mut piece = [0; 10_000];
    for _ in 0..300 {
        if client
            .write_all(&piece)
            .and_then(|()| server.read_exact(&mut piece))
            .is_err()
        {
            break;
        }
    }
    let closed = intake.closed(Duration::from_secs(5));
    assert_eq!(closed.len(), 1);
    assert_eq!(closed[0].peer, client.local_addr().unwrap());
    drop(taken);
}
