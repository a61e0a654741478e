//! Real connections over loopback.
#![cfg(target_os = "linux")]

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fastpipe_intake::{Closed, Intake, Reason};

const KIB: usize = 1 << 10;
const MIB: u64 = 1 << 20;

/// A server's end and a client's.
fn connected(listener: &TcpListener) -> (TcpStream, TcpStream) {
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    client.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
    client.set_nodelay(true).unwrap();
    let server = listener.accept().unwrap().0;
    server.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    (server, client)
}

fn listening(intake: &Intake) -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    intake.watch(port).unwrap();
    (listener, port)
}

/// As gRPC names it.
fn name(peer: SocketAddr) -> String {
    format!("ipv4:{}:{}", peer.ip(), peer.port())
}

/// In small packets, since only these come through where all are too far ahead.
fn try_send(ends: &mut (TcpStream, TcpStream), bytes: usize) -> io::Result<()> {
    let mut piece = [7; KIB];
    for _ in 0..bytes.div_ceil(piece.len()) {
        ends.1.write_all(&piece)?;
        ends.0.read_exact(&mut piece)?;
    }
    Ok(())
}

fn send(ends: &mut (TcpStream, TcpStream), bytes: usize) {
    try_send(ends, bytes).unwrap();
}

/// Sends what is too much: it is closed before all is sent, or soon after.
fn flood(ends: &mut (TcpStream, TcpStream), bytes: usize) {
    let _ = try_send(ends, bytes);
}

fn look(intake: &Intake) -> Vec<Closed> {
    intake.closed(Duration::from_millis(200))
}

#[test]
fn what_no_request_has_begun_with_closes_a_connection() {
    let intake = Intake::new(MIB, 100 * MIB);
    let (listener, port) = listening(&intake);
    let mut quiet = connected(&listener);
    let mut loud = connected(&listener);
    send(&mut quiet, 900 * KIB);
    send(&mut loud, 900 * KIB);
    assert_eq!(look(&intake), []);
    flood(&mut loud, 200 * KIB);
    let peer = loud.1.local_addr().unwrap();
    let closed = look(&intake);
    let [Closed { reason, .. }] = closed[..] else {
        panic!("{closed:?}")
    };
    assert_eq!(closed, [Closed { peer, port, reason }]);
    let Reason::Ahead(ahead) = reason else {
        panic!("{reason:?}")
    };
    assert!((MIB..=1110 * KIB as u64).contains(&ahead), "{ahead}");
    // Its owner sees the end, and when it closes it, the client's sending fails at once.
    assert_eq!(loud.0.read(&mut [0; 10]).unwrap(), 0);
    drop(loud.0);
    let start = Instant::now();
    assert!((0..1000).any(|_| loud.1.write_all(&[0; KIB * 64]).is_err()));
    assert!(start.elapsed() < Duration::from_secs(5));
    // Nobody is closed twice, and the other goes on.
    assert_eq!(look(&intake), []);
    send(&mut quiet, 10);
    quiet.0.write_all(b"x").unwrap();
    assert_eq!(quiet.1.read(&mut [0; 10]).unwrap(), 1);
}

#[test]
fn requests_keep_connections_open() {
    let intake = Intake::new(MIB, 100 * MIB);
    let (listener, _) = listening(&intake);
    let mut ends = connected(&listener);
    // Another descriptor of it changes nothing.
    let _again = ends.0.try_clone().unwrap();
    let peer = name(ends.1.local_addr().unwrap());
    for _ in 0..20 {
        for _ in 0..4 {
            send(&mut ends, 200 * KIB);
            intake.begun(&peer, 200 * KIB as u64);
        }
        assert_eq!(look(&intake), []);
    }
    // Requests of before leave nothing for later.
    flood(&mut ends, 1200 * KIB);
    assert_eq!(look(&intake).len(), 1);
}

#[test]
fn those_that_send_are_closed_while_all_are_too_far() {
    let intake = Intake::new(10 * MIB, 2 * MIB);
    let (listener, _) = listening(&intake);
    let mut all: Vec<_> = (0..3).map(|_| connected(&listener)).collect();
    for ends in &mut all[..2] {
        send(ends, 900 * KIB);
    }
    assert_eq!(look(&intake), []);
    flood(&mut all[2], 500 * KIB);
    let closed = look(&intake);
    assert_eq!(closed.len(), 1);
    assert_eq!(closed[0].peer, all[2].1.local_addr().unwrap());
    // What it sent counts still. Those that wait stay, and a new one may send a little, but no more.
    let mut more = connected(&listener);
    send(&mut more, 50 * KIB);
    assert_eq!(look(&intake), []);
    flood(&mut more, 100 * KIB);
    assert_eq!(look(&intake)[0].peer, more.1.local_addr().unwrap());
    // Requests begin, with what was closed too.
    for ends in &all {
        intake.begun(&name(ends.1.local_addr().unwrap()), 900 * KIB as u64);
    }
    assert_eq!(look(&intake), []);
    send(&mut all[0], 500 * KIB);
    assert_eq!(look(&intake), []);
}

#[test]
fn large_packets_wait_while_all_are_too_far() {
    let intake = Intake::new(10 * MIB, MIB);
    let (listener, _) = listening(&intake);
    let mut before = connected(&listener);
    let mut many: Vec<_> = (0..2).map(|_| connected(&listener)).collect();
    send(&mut many[0], 700 * KIB);
    assert_eq!(look(&intake), []);
    flood(&mut many[1], 700 * KIB);
    assert_eq!(look(&intake).len(), 1);
    let mut after = connected(&listener);
    for ends in [&mut before, &mut after] {
        send(ends, 10 * KIB);
        ends.1.write_all(&[1; 50 * KIB]).unwrap();
        ends.0.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        assert_eq!(ends.0.read(&mut [0; 10]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }
    // They come when there is room.
    for ends in &many {
        intake.begun(&name(ends.1.local_addr().unwrap()), 700 * KIB as u64);
    }
    for ends in [&mut before, &mut after] {
        ends.0.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        ends.0.read_exact(&mut [0; 50 * KIB]).unwrap();
    }
    assert_eq!(look(&intake), []);
}

#[test]
fn those_who_take_nothing_are_closed_when_others_wait() {
    let intake = Intake::new(MIB, MIB);
    let (listener, port) = listening(&intake);
    let mut all: Vec<_> = (0..3).map(|_| connected(&listener)).collect();
    for peer in ["nobody", "ipv4:127.0.0.1:1"] {
        intake.close_idle(peer);
    }
    let names: Vec<_> = all.iter().map(|ends| name(ends.1.local_addr().unwrap())).collect();
    // One takes something, and nobody says of another that it takes nothing.
    let mut closed = Vec::new();
    for _ in 0..15 {
        all[0].0.write_all(&[1; 5 * KIB]).unwrap();
        all[0].1.read_exact(&mut [0; 5 * KIB]).unwrap();
        intake.close_idle(&names[0]);
        intake.close_idle(&names[1]);
        closed.extend(look(&intake));
    }
    let peer = all[1].1.local_addr().unwrap();
    let reason = Reason::TakesNothing;
    assert_eq!(closed[0], Closed { peer, port, reason });
    assert!(closed.iter().all(|each| each.peer == peer), "{closed:?}");
    assert_eq!(all[1].0.read(&mut [0; 10]).unwrap(), 0);
    send(&mut all[0], 10);
    send(&mut all[2], 10);
}

#[test]
fn only_ports_of_servers_are_looked_at() {
    let intake = Intake::new(MIB, MIB);
    let (listener, port) = listening(&intake);
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut elsewhere = connected(&other);
    send(&mut elsewhere, 3000 * KIB);
    assert_eq!(look(&intake), []);
    // A port that is new has connections already.
    intake.watch(other.local_addr().unwrap().port()).unwrap();
    assert_eq!(look(&intake).len(), 1);

    // Two servers at a port, and one leaves.
    let mut ends = connected(&listener);
    intake.watch(port).unwrap();
    intake.leave(port);
    flood(&mut ends, 3000 * KIB);
    assert_eq!(look(&intake).len(), 1);
    intake.leave(port);
    let mut ends = connected(&listener);
    send(&mut ends, 3000 * KIB);
    assert_eq!(look(&intake), []);
    // Twice does no harm.
    intake.leave(port);
}

#[test]
fn whoever_waits_is_woken_when_no_port_is_left() {
    let intake = Intake::new(MIB, MIB);
    let (_listener, port) = listening(&intake);
    let woken = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(intake.closed(Duration::from_secs(100)), []);
            woken.store(true, Ordering::SeqCst);
        });
        std::thread::sleep(Duration::from_millis(100));
        assert!(!woken.load(Ordering::SeqCst));
        intake.leave(port);
    });
    assert!(woken.load(Ordering::SeqCst));
}
