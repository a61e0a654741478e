//! What requests have begun with, and what a connection is ahead of them.

use std::collections::HashMap;
use std::time::Duration;

use crate::Peer;

/// What a request has beside its body: headers and frames. Nobody is trusted with more.
const HEADERS: u64 = 4 << 10;
/// A client tells how much it has taken: that takes less than one byte in so many.
const TOLD_OF: u64 = 256;
/// And now and then it says that it's still there.
const SPARE_A_SECOND: u64 = 1 << 10;

/// A client that has taken so many bytes takes something. One that takes nothing answers when it is asked whether it is
/// there, by some bytes.
const TAKES: u64 = 4 << 10;

/// For how long what a closed connection had sent is taken to be in memory, unless a request begins with it.
const KEPT: Duration = Duration::from_secs(2);

/// A peer as gRPC names it.
pub(crate) fn named(peer: &str) -> Option<Peer> {
    let (kind, address) = peer.split_once(':')?;
    if !matches!(kind, "ipv4" | "ipv6") {
        return None;
    }
    let (host, port) = address.rsplit_once(':')?;
    let host = host.strip_prefix("%5B").or(host.strip_prefix('[')).unwrap_or(host);
    let host = host.strip_suffix("%5D").or(host.strip_suffix(']')).unwrap_or(host);
    // A link-local address names an interface, too.
    let host = host.split('%').next()?;
    Some((
        host.parse::<std::net::IpAddr>().ok()?.to_canonical(),
        port.parse().ok()?,
    ))
}

/// What requests have begun with, by peer.
#[derive(Debug, Default)]
pub(crate) struct Ledger(HashMap<Peer, u64>);

impl Ledger {
    pub(crate) fn add(&mut self, peer: Peer, size: u64) {
        let begun = self.0.entry(peer).or_default();
        *begun = begun.saturating_add(size).saturating_add(HEADERS);
    }

    pub(crate) fn of(&self, peer: &Peer) -> u64 {
        self.0.get(peer).copied().unwrap_or(0)
    }
}

/// What connections had sent that were closed, by peer: gRPC keeps it for a while, and for longer if it is a whole
/// request, which waits for its turn.
#[derive(Debug, Default)]
pub(crate) struct Kept(HashMap<Peer, (u64, Duration)>);

impl Kept {
    pub(crate) fn add(&mut self, peer: Peer, bytes: u64) {
        let (kept, age) = self.0.entry(peer).or_default();
        *kept = kept.saturating_add(bytes);
        *age = Duration::ZERO;
    }

    /// Forgets what has begun since, and what is old.
    pub(crate) fn look(&mut self, begun: &Ledger, since: Duration) {
        self.0.retain(|peer, (kept, age)| {
            *age += since;
            *kept = kept.saturating_sub(begun.of(peer));
            *kept > 0 && *age < KEPT
        });
    }

    /// Bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.values().map(|(kept, _)| kept).sum()
    }
}

/// What the kernel has counted of a connection.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    /// Bytes that its other end has confirmed.
    pub(crate) acked: u64,
    /// Bytes that it has sent.
    pub(crate) received: u64,
}

/// How far a connection is ahead of its requests.
#[derive(Debug, Default)]
pub(crate) struct Account {
    counts: Counts,
    spare: Duration,
    /// Bytes.
    pub(crate) ahead: u64,
    /// For how long it has sent nothing.
    pub(crate) silent: Duration,
    /// For how long it has taken nothing.
    pub(crate) idle: Duration,
    /// Bytes that it had confirmed when it took something last.
    taken: u64,
}

impl Account {
    /// What it has received since belongs to what has begun, or else it is ahead by it. What it is allowed and doesn't
    /// use isn't kept.
    pub(crate) fn look(&mut self, counts: Counts, begun: u64, since: Duration) {
        self.spare += since;
        let spare = u64::try_from(self.spare.as_millis()).unwrap_or(0) * SPARE_A_SECOND / 1000;
        if spare > 0 {
            self.spare = Duration::ZERO;
        }
        let told = counts.acked.saturating_sub(self.counts.acked) / TOLD_OF;
        let received = counts.received.saturating_sub(self.counts.received);
        self.idle += since;
        if counts.acked >= self.taken.saturating_add(TAKES) {
            (self.taken, self.idle) = (counts.acked, Duration::ZERO);
        }
        self.silent = if received > 0 {
            Duration::ZERO
        } else {
            self.silent + since
        };
        self.ahead = (self.ahead + received).saturating_sub(begun.saturating_add(told).saturating_add(spare));
        self.counts = counts;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_read_as_grpc_names_them() {
        let v4 = ("127.0.0.1".parse().unwrap(), 4000);
        assert_eq!(named("ipv4:127.0.0.1:4000"), Some(v4));
        assert_eq!(named("ipv6:%5B::ffff:127.0.0.1%5D:4000"), Some(v4));
        assert_eq!(named("ipv6:[::ffff:127.0.0.1]:4000"), Some(v4));
        assert_eq!(named("ipv6:%5B::1%5D:65535"), Some(("::1".parse().unwrap(), 65535)));
        assert_eq!(
            named("ipv6:%5Bfe80::1%25eth0%5D:1"),
            Some(("fe80::1".parse().unwrap(), 1))
        );
        for other in [
            "",
            "ipv4",
            "ipv4:",
            "ipv4:127.0.0.1",
            "ipv4:x:1",
            "ipv4:127.0.0.1:65536",
            "unix:x:1",
            "%:%:%",
        ] {
            assert_eq!(named(other), None, "{other}");
        }
    }

    #[test]
    fn requests_are_taken_off_what_was_received() {
        let mut account = Account::default();
        let mut counts = Counts {
            acked: 0,
            received: 1000,
        };
        account.look(counts, 0, Duration::ZERO);
        assert_eq!(account.ahead, 1000);
        // Nothing came.
        account.look(counts, 0, Duration::ZERO);
        assert_eq!(account.ahead, 1000);
        counts.received += 5000;
        account.look(counts, 900 + HEADERS, Duration::ZERO);
        assert_eq!(account.ahead, 1000 + 5000 - 900 - HEADERS);
        // Requests of more than was received leave nothing for later.
        account.look(counts, u64::MAX, Duration::ZERO);
        assert_eq!(account.ahead, 0);
        counts.received += 10;
        account.look(counts, 0, Duration::ZERO);
        assert_eq!(account.ahead, 10);
    }

    #[test]
    fn what_closed_connections_sent_counts_until_it_has_begun_or_is_old() {
        let peers = [1, 2, 3].map(|port| ("127.0.0.1".parse().unwrap(), port));
        let mut kept = Kept::default();
        for peer in peers {
            kept.add(peer, 100_000);
        }
        let mut begun = Ledger::default();
        begun.add(peers[0], 100_000 - HEADERS);
        begun.add(peers[1], 30_000 - HEADERS);
        kept.look(&begun, Duration::ZERO);
        assert_eq!(kept.bytes(), 170_000);
        kept.look(&Ledger::default(), KEPT - Duration::from_millis(1));
        kept.add(peers[2], 5);
        kept.look(&Ledger::default(), Duration::from_millis(1));
        assert_eq!(kept.bytes(), 100_005);
        kept.look(&Ledger::default(), KEPT);
        assert_eq!(kept.bytes(), 0);
    }

    #[test]
    fn clients_take_something_or_nothing() {
        let mut account = Account::default();
        let mut counts = Counts::default();
        for (acked, idle) in [
            (0, 1),
            (17, 2),
            (TAKES - 1, 3),
            (TAKES, 0),
            (TAKES, 1),
            (3 * TAKES, 0),
            (3 * TAKES + 17, 1),
        ] {
            counts.acked = acked;
            account.look(counts, 0, Duration::from_secs(1));
            assert_eq!(account.idle, Duration::from_secs(idle), "{acked}");
        }
    }

    #[test]
    fn clients_may_say_what_they_have_taken_and_that_they_are_there() {
        let mut account = Account::default();
        // What gRPC sends for 1 GiB that it takes in frames of 16 KiB, of 26 bytes each.
        account.look(
            Counts {
                acked: 1 << 30,
                received: 26 << 16,
            },
            0,
            Duration::ZERO,
        );
        assert_eq!(account.ahead, 0);
        // Pings of 17 bytes each second, looked at as often as may be.
        let mut account = Account::default();
        let mut counts = Counts::default();
        for step in 0..10_000 {
            counts.received += if step % 40 == 0 { 17 } else { 0 };
            account.look(counts, 0, Duration::from_millis(25));
            assert!(account.ahead <= 17);
        }
        // A trickle of 100 KB a second is none of these.
        for _ in 0..400 {
            counts.received += 2500;
            account.look(counts, 0, Duration::from_millis(25));
        }
        assert!(account.ahead > 950_000);
    }
}
