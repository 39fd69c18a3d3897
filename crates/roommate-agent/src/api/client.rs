//! The client of a daemon: through its socket, or over HTTP with its token.

use crate::AgentError;
use crate::api::control::{self, Reply, Request};
use crate::api::http;
use crate::paths::Paths;
use crate::process::rotated_file::{Parts, Place};
use std::time::{Duration, Instant};

/// How a daemon is reached.
#[derive(Clone, Debug)]
pub enum Client {
    /// The control socket of this state.
    Socket(Paths),
    /// Its HTTP address.
    Http {
        /// `http://HOST:PORT`.
        server: String,
        /// The daemon's token.
        token: String,
    },
}

impl Client {
    /// Sends a request; an error reply is returned as an error.
    pub fn ask(&self, request: &Request) -> Result<Reply, AgentError> {
        match self {
            Self::Socket(paths) => control::ask(paths, request),
            Self::Http { server, token } => http::ask(server, token, request),
        }
    }

    /// A piece of the journal from a position on, and the position after it. Through a socket
    /// client the files are read directly, so no daemon has to run.
    pub fn journal(&self, from: Place) -> Result<(Vec<u8>, Place), AgentError> {
        match self {
            Self::Socket(paths) => {
                let path = paths.journal();
                let read = Parts::new(&path).read(from, control::LONGEST_PIECE);
                read.map_err(AgentError::file("read", &path))
            }
            Self::Http { .. } => self.piece(&Request::Journal { from }),
        }
    }

    /// A piece of a job's output, and the position after it.
    pub fn log(&self, job: &str, from: Place) -> Result<(Vec<u8>, Place), AgentError> {
        self.piece(&Request::Logs { job: job.into(), from })
    }

    fn piece(&self, request: &Request) -> Result<(Vec<u8>, Place), AgentError> {
        match self.ask(request)? {
            Reply::Piece { bytes, next } => Ok((bytes.into(), next)),
            _ => Err(AgentError::Refused {
                what: "unexpected reply from the daemon".into(),
                hint: None,
            }),
        }
    }

    /// Waits until a daemon that was asked to stop has ended.
    pub fn await_end(&self) -> Result<(), AgentError> {
        match self {
            Self::Socket(paths) => control::await_end(paths),
            Self::Http { .. } => {
                let patience = Instant::now() + control::ANSWER_WITHIN;
                while Instant::now() < patience && self.ask(&Request::Machine {}).is_ok() {
                    std::thread::sleep(Duration::from_millis(50));
                }
                Ok(())
            }
        }
    }
}
