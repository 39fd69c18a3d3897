//! Connections of tenants: for each a thread reads lines and passes them on. A peer that sends an
//! invalid message gets the reason and is disconnected, without effect on other tenants.

use crate::machine::{Heard, Input};
use crate::process::{Deliver, small_thread};
use crate::protocol::{FromTenant, Hello, Refused, ToTenant, VERSION, read_line};
use std::io::{BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Most connections at a time.
const MOST_PEERS: usize = 1_000;
/// How long a message may take to be written before the tenant is disconnected.
const PATIENCE: Duration = Duration::from_millis(50);

/// A connection to a tenant.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    /// Its number, which is not reused.
    pub(crate) id: u64,
    stream: Arc<UnixStream>,
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

    /// Sends the reason and closes the connection.
    pub(crate) fn refuse(&self, reason: impl Into<String>) {
        let _ = self.send(&ToTenant::Refused(Refused { reason: reason.into() }));
        self.hang_up();
    }

    /// Whether the SDK uses the same version of the protocol; if not, the connection is refused.
    pub(crate) fn has_our_version(&self, hello: &Hello) -> bool {
        let (theirs, ours) = (hello.version, VERSION);
        if theirs != ours {
            let reason =
                format!("the SDK uses protocol version {theirs}, this machine version {ours}");
            self.refuse(reason);
        }
        theirs == ours
    }

    /// A connection for tests, and its other end.
    #[cfg(test)]
    pub(crate) fn pair(id: u64) -> (Self, UnixStream) {
        let (stream, other) = UnixStream::pair().unwrap();
        (Self { id, stream: Arc::new(stream) }, other)
    }

    pub(crate) fn hang_up(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
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
    let peers = Arc::new(AtomicUsize::new(0));
    for (id, stream) in listener.incoming().flatten().enumerate() {
        let _ = stream.set_write_timeout(Some(PATIENCE));
        let Ok(reading) = stream.try_clone() else { continue };
        let peer = Peer { id: id as u64, stream: Arc::new(stream) };
        if peers.fetch_add(1, Ordering::Relaxed) >= MOST_PEERS {
            peers.fetch_sub(1, Ordering::Relaxed);
            peer.refuse("too many connections");
            continue;
        }
        let (to, peers) = (Arc::clone(to), Arc::clone(&peers));
        let spawned = small_thread("tenant", move || {
            listen(reading, &peer, &to);
            peers.fetch_sub(1, Ordering::Relaxed);
        });
        drop(spawned);
    }
}

fn listen(stream: UnixStream, peer: &Peer, to: &Deliver<Input>) {
    let mut from = BufReader::new(stream);
    let mut line_number = 0;
    loop {
        line_number += 1;
        let line = match read_line(&mut from) {
            Ok(Some(line)) => line,
            Ok(None) => break,
            Err(e) if e.kind() == std::io::ErrorKind::InvalidData => {
                peer.refuse(format!("line {line_number}: {e}"));
                break;
            }
            Err(_) => break,
        };
        match FromTenant::read(&line) {
            Ok(message) => {
                if line_number == 1 && !matches!(message, FromTenant::Hello(_)) {
                    peer.refuse("line 1: the first message has to be a hello");
                    break;
                }
                if !to(Input(Heard::Message(peer.clone(), message))) {
                    break;
                }
            }
            Err(what) => {
                peer.refuse(format!("line {line_number}: {what}"));
                break;
            }
        }
    }
    to(Input(Heard::Gone(peer.id)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, Read};
    use std::sync::mpsc;

    #[test]
    fn invalid_messages_disconnect_only_their_sender() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().join("t.sock");
        let listener = UnixListener::bind(&at).unwrap();
        let (sender, inputs) = mpsc::channel();
        let to: Deliver<Input> = Arc::new(move |input: Input| sender.send(input.0).is_ok());
        std::thread::spawn(move || serve(&listener, &to));
        let hello = br#"{"hello":{"version":1,"token":"x","pid":1}}"#;

        let mut good = UnixStream::connect(&at).unwrap();
        good.write_all(hello).unwrap();
        good.write_all(b"\n").unwrap();
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
            assert!(matches!(inputs.recv().unwrap(), Heard::Gone(_)));
        }

        assert!(peer.send(&ToTenant::Stop(crate::protocol::Nothing {})));
        let mut answer = String::new();
        BufReader::new(&good).read_line(&mut answer).unwrap();
        assert_eq!(answer, "{\"stop\":{}}\n");
    }
}
