//! The client of a daemon: through its socket, or over HTTPS with a token.

use crate::AgentError;
use crate::api::control::{self, Reply, Request};
use crate::api::http;
pub use crate::api::http::Server;
use crate::paths::Paths;
use crate::process::rotated_file::{Parts, Place};
use roommate_core::journal::explain::Moment;
use std::io;
use std::time::{Duration, Instant};

/// How long a client goes on asking a daemon that has no room for its connection.
const BUSY_WAIT: Duration = Duration::from_secs(5);
const BUSY_PAUSE: Duration = Duration::from_millis(100);

/// How a daemon is reached.
#[derive(Clone, Debug)]
pub enum Client {
    /// The control socket of this state.
    Socket(Paths),
    /// Its HTTPS address.
    Http {
        /// The address, and the daemon that is expected there.
        server: Server,
        /// A token for it.
        token: String,
    },
}

fn unexpected() -> AgentError {
    AgentError::Refused { what: "unexpected reply from the daemon".into(), hint: None }
}

impl Client {
    /// Sends a request; an error reply is returned as an error.
    pub fn ask(&self, request: &Request) -> Result<Reply, AgentError> {
        let end = Instant::now() + BUSY_WAIT;
        loop {
            let reply = match self {
                Self::Socket(paths) => control::ask(paths, request),
                Self::Http { server, token } => http::ask(server, token, request),
            };
            match reply {
                Err(AgentError::Busy { .. }) if Instant::now() < end => {
                    std::thread::sleep(BUSY_PAUSE);
                }
                other => return other,
            }
        }
    }

    /// A piece of the journal from a position on, and the position after it. A client that may read
    /// the files reads them directly, so no daemon has to run.
    pub fn journal(&self, from: Place) -> Result<(Vec<u8>, Place), AgentError> {
        if let Self::Socket(paths) = self {
            let path = paths.journal();
            match Parts::new(&path).read(from, control::LONGEST_PIECE) {
                Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {}
                read => return read.map_err(AgentError::file("read", &path)),
            }
        }
        self.piece(&Request::Journal { from })
    }

    /// The history of a job of this user's.
    pub fn history(&self, job: &str) -> Result<Vec<Moment>, AgentError> {
        match self.ask(&Request::History { job: job.into() })? {
            Reply::History(moments) => Ok(moments),
            _ => Err(unexpected()),
        }
    }

    /// A piece of a job's output, and the position after it.
    pub fn log(&self, job: &str, from: Place) -> Result<(Vec<u8>, Place), AgentError> {
        self.piece(&Request::Logs { job: job.into(), from })
    }

    fn piece(&self, request: &Request) -> Result<(Vec<u8>, Place), AgentError> {
        match self.ask(request)? {
            Reply::Piece { bytes, next } => Ok((bytes.into(), next)),
            _ => Err(unexpected()),
        }
    }

    /// Waits until a daemon that was asked to stop has ended.
    pub fn await_end(&self) -> Result<(), AgentError> {
        if let Self::Socket(paths) = self {
            match control::await_end(paths) {
                Err(AgentError::File { error, .. })
                    if error.kind() == io::ErrorKind::PermissionDenied => {}
                ended => return ended,
            }
        }
        let patience = Instant::now() + control::ANSWER_WITHIN;
        while Instant::now() < patience && self.ask(&Request::Machine {}).is_ok() {
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}
