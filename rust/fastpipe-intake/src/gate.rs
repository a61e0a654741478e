//! A gate in the kernel, which lets only small packets through to a socket.
//!
//! It is a packet filter (S. McCanne, V. Jacobson, The BSD packet filter, 1993), which any process may attach to
//! sockets of its own. What it drops the other end keeps, and sends again after a while, as if it had been lost.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::io;
use std::net::TcpStream;
use std::os::fd::AsRawFd;

use libc::{c_int, sock_filter, sock_fprog};

/// Bytes of a packet beside its head. A request has some hundred, and what TLS begins with some thousand; what is sent
/// of a large request comes in packets of some ten thousand, or is put together to such ones by the kernel.
const LARGEST: u32 = 4 << 10;

/// What is loaded are bytes from TCP's head on. Its twelfth has the head's length, in words, in the upper four bits.
const PROGRAM: [sock_filter; 9] = [
    step(libc::BPF_LD | libc::BPF_B | libc::BPF_ABS, 12),
    step(libc::BPF_ALU | libc::BPF_RSH | libc::BPF_K, 4),
    step(libc::BPF_ALU | libc::BPF_LSH | libc::BPF_K, 2),
    step(libc::BPF_MISC | libc::BPF_TAX, 0),
    step(libc::BPF_LD | libc::BPF_W | libc::BPF_LEN, 0),
    step(libc::BPF_ALU | libc::BPF_SUB | libc::BPF_X, 0),
    // What is larger goes to the next step, all else passes it by.
    sock_filter {
        jf: 1,
        ..step(libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K, LARGEST)
    },
    step(libc::BPF_RET | libc::BPF_K, 0),
    step(libc::BPF_RET | libc::BPF_K, u32::MAX),
];

#[allow(clippy::cast_possible_truncation)] // Codes have eight bits.
const fn step(code: u32, k: u32) -> sock_filter {
    sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k,
    }
}

/// Only small packets pass from now on. Connections that a listening socket accepts begin so, too.
pub(crate) fn shut(stream: &TcpStream) -> io::Result<()> {
    let mut steps = PROGRAM;
    let program = sock_fprog {
        len: PROGRAM.len().try_into().expect("it is short"),
        filter: steps.as_mut_ptr(),
    };
    set(
        stream,
        libc::SO_ATTACH_FILTER,
        (&raw const program).cast(),
        size_of_val(&program),
    )
}

/// Everything passes. An error if it did before.
pub(crate) fn open(stream: &TcpStream) -> io::Result<()> {
    let nothing: c_int = 0;
    set(
        stream,
        libc::SO_DETACH_FILTER,
        (&raw const nothing).cast(),
        size_of_val(&nothing),
    )
}

fn set(stream: &TcpStream, name: c_int, value: *const c_void, size: usize) -> io::Result<()> {
    let size = libc::socklen_t::try_from(size).expect("it is small");
    // SAFETY: `value` has `size` bytes, and what it points to lives until the kernel has copied it, which it does here.
    let status = unsafe { libc::setsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, name, value, size) };
    if status == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use super::*;

    fn connected(address: &str) -> (TcpListener, TcpStream, TcpStream) {
        let listener = TcpListener::bind(address).unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        client.set_nodelay(true).unwrap();
        let server = listener.accept().unwrap().0;
        server.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        (listener, server, client)
    }

    #[test]
    fn a_gate_lets_small_packets_through() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(_) = TcpListener::bind(address) else { continue };
            let (_listener, mut server, mut client) = connected(address);
            let mut large = [1; 9000];
            let mut small = [2; LARGEST as usize];
            shut(&server).unwrap();
            client.write_all(&small).unwrap();
            server.read_exact(&mut small).unwrap();
            // Twice does no harm.
            shut(&server).unwrap();
            client.write_all(&large).unwrap();
            assert_eq!(server.read(&mut large).unwrap_err().kind(), io::ErrorKind::WouldBlock);
            // What the server sends is none of its business.
            server.write_all(&large).unwrap();
            client.read_exact(&mut large).unwrap();
            // Nothing is lost.
            open(&server).unwrap();
            server.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            server.read_exact(&mut large).unwrap();
            assert_eq!(large, [1; 9000]);
            assert!(open(&server).is_err());
        }
    }

    #[test]
    fn connections_begin_with_the_gate_of_their_listener() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let gate = TcpStream::from(std::os::fd::OwnedFd::from(listener.try_clone().unwrap()));
        shut(&gate).unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut server = listener.accept().unwrap().0;
        server.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        client.write_all(&[1; 9000]).unwrap();
        assert!(server.read(&mut [0; 10]).is_err());
        // It stays there when that of the listener is opened.
        open(&gate).unwrap();
        open(&server).unwrap();
    }
}
