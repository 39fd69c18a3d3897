//! Connections of tenants: one thread each reads lines and passes them on. A peer that sends what is no
//! message is told why and cut off; the others do not notice.

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
/// A tenant that does not take its mail for so long is cut off.
const PATIENCE: Duration = Duration::from_millis(50);

/// A connection.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    /// Its number; never used again.
    pub(crate) id: u64,
    stream: Arc<UnixStream>,
}

impl Peer {
    /// Says something; whether it could be said.
    pub(crate) fn say(&self, message: &ToTenant) -> bool {
        let said = (&*self.stream).write_all(&message.line()).is_ok();
        if !said {
            self.hang_up();
        }
        said
    }

    /// Says why, and hangs up.
    pub(crate) fn refuse(&self, reason: impl Into<String>) {
        let _ = self.say(&ToTenant::Refused(Refused { reason: reason.into() }));
        self.hang_up();
    }

    /// Whether the SDK on the other side speaks our version; if not, it is told and cut off.
    pub(crate) fn speaks_our_version(&self, hello: &Hello) -> bool {
        let (theirs, ours) = (hello.version, VERSION);
        if theirs != ours {
            self.refuse(format!("it speaks version {theirs}, this machine speaks version {ours}"));
        }
        theirs == ours
    }

    pub(crate) fn hang_up(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// What a process with the SDK finds in its environment.
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

/// Serves tenants, one thread each, until the process ends.
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
    fn nonsense_is_answered_with_a_reason_and_hurts_nobody_else() {
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
            // A long line may be cut off while it is still being sent.
            let _ = stream.write_all(bad);
            let mut said = String::new();
            let _ = BufReader::new(&stream).read_line(&mut said);
            assert!(said.contains(why), "{said:?} does not say {why:?}");
            let mut rest = Vec::new();
            let _ = stream.read_to_end(&mut rest);
            assert!(matches!(inputs.recv().unwrap(), Heard::Gone(_)));
        }

        assert!(peer.say(&ToTenant::Stop(crate::protocol::Nothing {})));
        let mut said = String::new();
        BufReader::new(&good).read_line(&mut said).unwrap();
        assert_eq!(said, "{\"stop\":{}}\n");
    }
}
