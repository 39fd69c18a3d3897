//! Connections with limits: how many there are, and how long each may take, whatever its peer does.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long accepting pauses when the system lacks file descriptors or memory: others have to close
/// theirs first.
const PAUSE: Duration = Duration::from_millis(50);
/// How long, and how much, is read and discarded after an answer.
const DRAIN_WITHIN: Duration = Duration::from_millis(500);
const DRAIN_BYTES: u64 = 16 << 20;

/// An accepted connection. After an error it returns a moment later, because the cause may last.
pub(crate) fn accepted<T>(result: io::Result<T>) -> Option<T> {
    if result.is_err() {
        std::thread::sleep(PAUSE);
    }
    result.ok()
}

/// Limits the number of connections, in all and of each user.
pub(crate) struct Admission {
    most: usize,
    most_each: usize,
    open: Mutex<BTreeMap<u32, usize>>,
}

/// A place among the connections, given back when it is dropped.
pub(crate) struct Admitted {
    uid: u32,
    admission: Arc<Admission>,
}

impl Admission {
    pub(crate) fn new(most: usize, most_each: usize) -> Arc<Self> {
        Arc::new(Self { most, most_each, open: Mutex::new(BTreeMap::new()) })
    }

    /// Takes a place, or says why there is none.
    pub(crate) fn admit(self: &Arc<Self>, uid: u32) -> Result<Admitted, String> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.values().sum::<usize>() >= self.most {
            return Err(format!("the daemon is busy: {} connections are open", self.most));
        }
        let own = open.entry(uid).or_default();
        if *own >= self.most_each {
            return Err(format!("you have {own} connections to the daemon open already"));
        }
        *own += 1;
        Ok(Admitted { uid, admission: Arc::clone(self) })
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut open = self.admission.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = open.get_mut(&self.uid) {
            *own -= 1;
            if *own == 0 {
                open.remove(&self.uid);
            }
        }
    }
}

/// What both kinds of sockets have.
pub(crate) trait Socket: Read + Write {
    fn limit_read(&self, within: Duration) -> io::Result<()>;
    fn limit_write(&self, within: Duration) -> io::Result<()>;
    fn end_writing(&self) -> io::Result<()>;
}

impl Socket for UnixStream {
    fn limit_read(&self, within: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(within))
    }
    fn limit_write(&self, within: Duration) -> io::Result<()> {
        self.set_write_timeout(Some(within))
    }
    fn end_writing(&self) -> io::Result<()> {
        self.shutdown(Shutdown::Write)
    }
}

impl Socket for TcpStream {
    fn limit_read(&self, within: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(within))
    }
    fn limit_write(&self, within: Duration) -> io::Result<()> {
        self.set_write_timeout(Some(within))
    }
    fn end_writing(&self) -> io::Result<()> {
        self.shutdown(Shutdown::Write)
    }
}

/// A connection on which everything until a set time takes place, however slowly the peer reads or
/// writes; later calls fail with [`io::ErrorKind::TimedOut`].
pub(crate) struct Timed<S> {
    stream: S,
    end: Instant,
}

impl<S: Socket> Timed<S> {
    pub(crate) fn new(stream: S, within: Duration) -> Self {
        Self { stream, end: Instant::now() + within }
    }

    /// Gives the connection a new limit, from now on.
    pub(crate) fn extend(&mut self, within: Duration) {
        self.end = Instant::now() + within;
    }

    fn left(&self) -> io::Result<Duration> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
    }

    /// Reads and discards what the peer still sends, for a moment: closing with unread data resets
    /// the connection, and the answer could be lost.
    pub(crate) fn drain(mut self) {
        let _ = self.stream.end_writing();
        self.extend(DRAIN_WITHIN);
        let _ = io::copy(&mut self.take(DRAIN_BYTES), &mut io::sink());
    }
}

/// The system's error for a time limit is that of a socket which must not wait.
fn in_time<T>(result: io::Result<T>) -> io::Result<T> {
    result.map_err(|e| match e.kind() {
        io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
        _ => e,
    })
}

impl<S: Socket> Read for Timed<S> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.stream.limit_read(self.left()?)?;
        in_time(self.stream.read(to))
    }
}

impl<S: Socket> Write for Timed<S> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.stream.limit_write(self.left()?)?;
        in_time(self.stream.write(from))
    }
    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_limited_in_all_and_for_each_user() {
        let admission = Admission::new(3, 2);
        let a1 = admission.admit(1).unwrap();
        let _a2 = admission.admit(1).unwrap();
        let why = |r: Result<Admitted, String>| r.err().unwrap();
        assert!(why(admission.admit(1)).starts_with("you have 2 connections"));
        let _b = admission.admit(2).unwrap();
        assert!(why(admission.admit(3)).starts_with("the daemon is busy: 3"));
        drop(a1);
        assert!(admission.admit(3).is_ok());
    }

    #[test]
    fn a_peer_that_drips_does_not_gain_time() {
        let (here, there) = UnixStream::pair().unwrap();
        let dripping = std::thread::spawn(move || {
            while (&there).write_all(b"x").is_ok() {
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let began = Instant::now();
        let mut timed = Timed::new(here, Duration::from_millis(150));
        let mut got = Vec::new();
        let error = timed.read_to_end(&mut got).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(!got.is_empty() && began.elapsed() < Duration::from_secs(5));
        timed.drain();
        assert!(began.elapsed() < Duration::from_secs(5));
        dripping.join().unwrap();
    }

    #[test]
    fn a_peer_that_never_reads_is_given_up() {
        let (here, _there) = UnixStream::pair().unwrap();
        let mut timed = Timed::new(here, Duration::from_millis(100));
        let error = timed.write_all(&vec![0; 64 << 20]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
