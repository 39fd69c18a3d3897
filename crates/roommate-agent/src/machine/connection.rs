//! Connections of tenants: for each a thread reads lines and passes them on. A peer that sends an
//! invalid message gets the reason and is disconnected, without effect on other tenants.
//!
//! ```text
//!  connect ─▶ lobby ── hello with a token of this machine ─▶ admitted ─▶ messages
//!               └─ silent for HELLO_WITHIN, or the oldest silent one of too many: closed
//! ```
//!
//! - A connection counts as a tenant's only once the machine knows its token, so strangers compete
//!   with each other for room and not with tenants.
//! - Who sends more than its allowance is read more slowly.

mod lobby;

use crate::machine::connection::lobby::{Lobby, Outcome};
use crate::machine::{Heard, Input};
use crate::process::{Deliver, small_thread};
use crate::protocol::{FromTenant, Hello, Refused, SPOKEN, ToTenant, read_line};
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a message may take to be written before the tenant is disconnected.
const PATIENCE: Duration = Duration::from_millis(50);
/// How long a connection may take to say hello.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
/// How long a line may take from its first byte to its last.
const LINE_WITHIN: Duration = Duration::from_secs(5);
/// How long the machine waits after it could not accept a connection, mostly because no file
/// descriptor is left.
const BREATH: Duration = Duration::from_millis(100);
/// When a tenant may try again that was put off, in seconds.
const LATER_S: f64 = 1.0;
/// Why a tenant is put off where there is no room.
const FULL: &str = "too many connections";

/// A connection to a tenant.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    /// Its number, which is not reused.
    pub(crate) id: u64,
    stream: Arc<UnixStream>,
    lobby: Arc<Lobby>,
}

impl Peer {
    /// Sends a message; false if the connection is broken.
    pub(crate) fn send(&self, message: &ToTenant) -> bool {
        let sent = (&*self.stream).write_all(&message.line()).is_ok();
        if !sent {
            self.hang_up();
        }
        sent
    }

    /// Sends the reason and closes the connection, for good.
    pub(crate) fn refuse(&self, reason: impl Into<String>) {
        self.send(&ToTenant::Refused(Refused { reason: reason.into(), later_s: None }));
        self.hang_up();
    }

    /// Closes the connection; the tenant may try again.
    pub(crate) fn put_off(&self, reason: &str) {
        let reason = reason.into();
        self.send(&ToTenant::Refused(Refused { reason, later_s: Some(LATER_S) }));
        self.hang_up();
    }

    /// The version of the protocol in which the tenant is answered; if there is none, the
    /// connection is refused.
    pub(crate) fn agree_on_version(&self, hello: &Hello) -> Option<u32> {
        hello.common_version(SPOKEN).map_err(|reason| self.refuse(reason)).ok()
    }

    /// The process at the other end.
    pub(crate) fn pid(&self) -> Option<u32> {
        let peer = rustix::net::sockopt::socket_peercred(&*self.stream).ok()?;
        u32::try_from(peer.pid.as_raw_nonzero().get()).ok()
    }

    /// Whether the process at the other end runs as this user, or as root.
    pub(crate) fn is_of(&self, uid: u32) -> bool {
        let peer = rustix::net::sockopt::socket_peercred(&*self.stream);
        peer.is_ok_and(|peer| peer.uid.is_root() || peer.uid.as_raw() == uid)
    }

    /// Counts the connection as that of a tenant, whose token the machine knows. False if it is
    /// gone already, or if there is no room, and then it is put off.
    pub(crate) fn admit(&self) -> bool {
        match self.lobby.admit(self.id) {
            Outcome::Admitted => true,
            Outcome::Full => {
                self.put_off(FULL);
                false
            }
            Outcome::Gone => false,
        }
    }

    /// A connection for tests, and its other end.
    #[cfg(test)]
    pub(crate) fn pair(id: u64) -> (Self, UnixStream) {
        let (stream, other) = UnixStream::pair().unwrap();
        let (stream, lobby) = (Arc::new(stream), Arc::new(Lobby::default()));
        lobby.come(id, &stream, Instant::now()).unwrap();
        (Self { id, stream, lobby }, other)
    }

    pub(crate) fn hang_up(&self) {
        hang_up(&self.stream);
    }
}

fn hang_up(stream: &UnixStream) {
    let _ = stream.shutdown(Shutdown::Both);
}

/// Environment variables of a job, for the SDK.
pub(crate) fn env(
    socket: &Path,
    token: &str,
    job: &str,
    checkpoint: &Path,
) -> [(String, String); 4] {
    [
        ("ROOMMATE_SOCKET".into(), socket.display().to_string()),
        ("ROOMMATE_TOKEN".into(), token.into()),
        ("ROOMMATE_JOB".into(), job.into()),
        ("ROOMMATE_CHECKPOINT".into(), checkpoint.display().to_string()),
    ]
}

/// Serves tenants, each in a thread, until the process ends.
pub(crate) fn serve(listener: &UnixListener, to: &Deliver<Input>) {
    let lobby = Arc::new(Lobby::default());
    let mut next = 0..;
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => Arc::new(stream),
            Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {
                continue;
            }
            Err(_) => {
                lobby.make_room(Instant::now());
                std::thread::sleep(BREATH);
                continue;
            }
        };
        let Some(id) = next.next() else { return };
        let _ = stream.set_write_timeout(Some(PATIENCE));
        let peer = Peer { id, stream, lobby: Arc::clone(&lobby) };
        receive(&peer, to);
    }
}

/// Takes a connection into the lobby, and starts to read it.
fn receive(peer: &Peer, to: &Deliver<Input>) {
    loop {
        match peer.lobby.come(peer.id, &peer.stream, Instant::now()) {
            Ok(true) => break,
            Ok(false) => return peer.put_off(FULL),
            // Meanwhile further connections wait in the kernel.
            Err(wait) => std::thread::sleep(wait),
        }
    }
    let (to, reader) = (Arc::clone(to), peer.clone());
    let spawned = small_thread("tenant", move || {
        if listen(&reader, &to) {
            to(Input(Heard::Gone(reader.id)));
        }
        reader.lobby.leave(reader.id);
    });
    if spawned.is_err() {
        peer.lobby.leave(peer.id);
        peer.put_off(FULL);
    }
}

/// Passes on messages until the connection is closed, by either side. Returns whether there were
/// any.
fn listen(peer: &Peer, to: &Deliver<Input>) -> bool {
    let came = Instant::now();
    let mut from = BufReader::new(Timed::new(&peer.stream, came + HELLO_WITHIN));
    let mut allowance = Allowance::new(came);
    let mut line_number = 0_u64;
    loop {
        line_number += 1;
        let line = match next_line(&mut from, line_number == 1) {
            Ok(Some(line)) => line,
            Err(e) if e.kind() == ErrorKind::InvalidData => {
                peer.refuse(format!("line {line_number}: {e}"));
                break;
            }
            // A tenant that was stopped by a signal may be late, and then connects again; so it
            // is not refused.
            Ok(None) | Err(_) => break,
        };
        let message = match FromTenant::read(&line) {
            Ok(message) => message,
            Err(what) => {
                peer.refuse(format!("line {line_number}: {what}"));
                break;
            }
        };
        if line_number == 1 {
            if !matches!(message, FromTenant::Hello(_)) {
                peer.refuse("line 1: the first message has to be a hello");
                break;
            }
            peer.lobby.spoke(peer.id);
        }
        let cost = cost(&message);
        if !to(Input(Heard::Message(peer.clone(), message))) {
            break;
        }
        std::thread::sleep(allowance.spend(cost, Instant::now()));
    }
    peer.hang_up();
    line_number > 1
}

/// The next line. Only the first has to begin within a time, but each has to end within one.
fn next_line(from: &mut BufReader<Timed<'_>>, is_first: bool) -> io::Result<Option<Vec<u8>>> {
    if !is_first {
        from.get_mut().until = None;
    }
    if from.fill_buf()?.is_empty() {
        return Ok(None);
    }
    let end = Instant::now() + LINE_WITHIN;
    let timed = from.get_mut();
    timed.until = Some(timed.until.map_or(end, |hello| hello.min(end)));
    read_line(from)
}

/// A stream that is read until a time.
struct Timed<'a> {
    stream: &'a UnixStream,
    until: Option<Instant>,
    /// Whether the stream has a time limit now.
    limited: bool,
}

impl<'a> Timed<'a> {
    fn new(stream: &'a UnixStream, until: Instant) -> Self {
        Self { stream, until: Some(until), limited: false }
    }
}

impl Read for Timed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.until.map(|until| until.saturating_duration_since(Instant::now()));
        if left == Some(Duration::ZERO) {
            return Err(ErrorKind::TimedOut.into());
        }
        if left.is_some() || self.limited {
            self.stream.set_read_timeout(left)?;
            self.limited = left.is_some();
        }
        self.stream.read(buffer)
    }
}

/// What a tenant may send, in units that messages cost: units a second, and at most a second's
/// worth at once.
const UNITS_A_SECOND: f64 = 2000.0;

/// What a message costs: 20 checkpoints a second, each of which is written to the disk, 200 other
/// reports, 2,000 messages of stages (a job with steps of 4 ms and four stages).
fn cost(message: &FromTenant) -> f64 {
    match message {
        FromTenant::Checkpointed(_) | FromTenant::Hello(_) => 100.0,
        FromTenant::Enter(_) | FromTenant::Leave(_) => 1.0,
        _ => 10.0,
    }
}

/// What a tenant may still send.
struct Allowance {
    units: f64,
    at: Instant,
}

impl Allowance {
    fn new(now: Instant) -> Self {
        Self { units: UNITS_A_SECOND, at: now }
    }

    /// Spends units; returns how long to wait before the next message is read.
    fn spend(&mut self, units: f64, now: Instant) -> Duration {
        let since = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = now;
        self.units = (self.units + UNITS_A_SECOND * since).min(UNITS_A_SECOND) - units;
        Duration::from_secs_f64((-self.units / UNITS_A_SECOND).max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{Done, Nothing};
    use std::sync::mpsc;

    /// A machine's socket, and what is heard there.
    fn open(folder: &Path) -> (std::path::PathBuf, mpsc::Receiver<Heard>) {
        let at = folder.join("t.sock");
        let listener = UnixListener::bind(&at).unwrap();
        let (sender, inputs) = mpsc::channel();
        let to: Deliver<Input> = Arc::new(move |input: Input| sender.send(input.0).is_ok());
        std::thread::spawn(move || serve(&listener, &to));
        (at, inputs)
    }

    const HELLO: &[u8] = b"{\"hello\":{\"version\":1,\"token\":\"x\",\"pid\":1}}\n";

    #[test]
    fn invalid_messages_disconnect_only_their_sender() {
        let folder = tempfile::tempdir().unwrap();
        let (at, inputs) = open(folder.path());
        let mut good = UnixStream::connect(&at).unwrap();
        good.write_all(HELLO).unwrap();
        let Heard::Message(peer, FromTenant::Hello(_)) = inputs.recv().unwrap() else { panic!() };

        let endless = vec![b'x'; crate::protocol::LONGEST_LINE + 1];
        for (bad, why) in [
            (&b"\x00\xff\n"[..], "line 1: expected value"),
            (&b"{\"resumed\":{}}\n"[..], "line 1: the first message has to be a hello"),
            (&endless[..], "line 1: a line of more than"),
        ] {
            let mut stream = UnixStream::connect(&at).unwrap();
            // The connection may be closed while a long line is still being sent.
            let _ = stream.write_all(bad);
            let mut answer = String::new();
            let _ = BufReader::new(&stream).read_line(&mut answer);
            assert!(answer.contains(why), "{answer:?} does not contain {why:?}");
            let mut rest = Vec::new();
            let _ = stream.read_to_end(&mut rest);
        }

        assert!(peer.send(&ToTenant::Stop(Nothing {})));
        let mut answer = String::new();
        BufReader::new(&good).read_line(&mut answer).unwrap();
        assert_eq!(answer, "{\"stop\":{}}\n");
    }

    #[test]
    fn a_tenant_gets_in_past_a_crowd_of_silent_strangers() {
        let folder = tempfile::tempdir().unwrap();
        let (at, inputs) = open(folder.path());
        let crowd: Vec<UnixStream> = (0..80).map(|_| UnixStream::connect(&at).unwrap()).collect();
        let mut tenant = UnixStream::connect(&at).unwrap();
        tenant.write_all(HELLO).unwrap();
        let Heard::Message(peer, _) = inputs.recv().unwrap() else { panic!() };
        assert!(peer.admit() && peer.admit());
        // The first of the crowd made room for it, without a word.
        let mut rest = Vec::new();
        (&crowd[0]).read_to_end(&mut rest).unwrap();
        assert_eq!(rest, b"");
        // Only who said something is said to be gone.
        drop(tenant);
        let Heard::Gone(id) = inputs.recv().unwrap() else { panic!() };
        assert_eq!(id, peer.id);
    }

    #[test]
    fn lines_that_do_not_begin_or_end_in_time_are_given_up() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let late = || Instant::now() + Duration::from_millis(20);
        let mut from = BufReader::new(Timed::new(&ours, late()));
        let kind = |got: io::Result<Option<Vec<u8>>>| got.unwrap_err().kind();
        let slow = |kind| matches!(kind, ErrorKind::TimedOut | ErrorKind::WouldBlock);
        assert!(slow(kind(next_line(&mut from, true))));
        theirs.write_all(b"half").unwrap();
        from.get_mut().until = Some(late());
        assert!(slow(kind(next_line(&mut from, true))));
        theirs.write_all(b"a\nb\n").unwrap();
        assert_eq!(next_line(&mut from, false).unwrap().unwrap(), b"a");
        assert_eq!(next_line(&mut from, false).unwrap().unwrap(), b"b");
        drop(theirs);
        assert_eq!(next_line(&mut from, false).unwrap(), None);
    }

    #[test]
    fn a_loud_tenant_is_read_at_its_allowed_rate() {
        let base = Instant::now();
        let checkpoint = FromTenant::Checkpointed(Done { done: 1.0 });
        let resumed = FromTenant::Resumed(Nothing {});
        for (message, a_second) in [(checkpoint, 20.0), (resumed, 200.0)] {
            let (mut allowance, mut now, mut sent) = (Allowance::new(base), base, 0);
            // As fast as it can for ten seconds: a second's worth at once, then the rate.
            while now < base + Duration::from_secs(10) {
                now += allowance.spend(cost(&message), now);
                sent += 1;
            }
            let most = 11.0 * a_second;
            assert!((most - 2.0..=most + 2.0).contains(&f64::from(sent)), "{sent} of {most}");
        }
        // Twice a second is never slowed.
        let (mut allowance, step) = (Allowance::new(base), Duration::from_millis(500));
        for n in 0..100 {
            assert_eq!(allowance.spend(10.0, base + n * step), Duration::ZERO);
        }
    }
}
