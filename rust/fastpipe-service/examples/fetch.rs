//! Reads numbers, for a try by hand.
use std::time::{Duration, Instant};

use fastpipe_service::connection::Connection;
use fastpipe_service::flight::Part;

fn main() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let connection = Connection::open("127.0.0.1:7778", None, Duration::from_secs(5))
            .await
            .unwrap();
        println!("{:?}", connection.act("health", b"abc").await);
        println!("{:?}", connection.act("nothing", b"abc").await);
        for _ in 0..3 {
            let (begun, mut total, mut said) = (Instant::now(), 0, 0);
            let mut target = vec![0u8; 64 << 20];
            let mut stream = connection.get(b"8000").await.unwrap();
            while stream
                .receive(|part| {
                    match part {
                        Part::Metadata(_) => said += 1,
                        Part::Data(data) => {
                            let at = total % (32 << 20);
                            target[at..at + data.len()].copy_from_slice(data);
                            total += data.len();
                        }
                    }
                    Ok(())
                })
                .await
                .unwrap()
            {}
            println!(
                "{said} messages, {:.2} GB/s",
                total as f64 / begun.elapsed().as_secs_f64() / 1e9
            );
        }
    });
}
