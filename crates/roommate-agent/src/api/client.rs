//! How users reach a daemon: through its socket, or over HTTP with its token.

use crate::AgentError;
use crate::api::control::{self, Reply, Request};
use crate::api::http;
use crate::paths::Paths;
use crate::process::rotated_file::{Parts, Place};
use std::time::{Duration, Instant};

/// A way to a daemon.
#[derive(Clone, Debug)]
pub enum Client {
    /// The socket in its state.
    Socket(Paths),
    /// Its HTTP address.
    Http {
        /// `http://HOST:PORT`.
        server: String,
        /// What it wants to see.
        token: String,
    },
}

impl Client {
    /// Asks; an error that it answers is an error.
    pub fn ask(&self, request: &Request) -> Result<Reply, AgentError> {
        match self {
            Self::Socket(paths) => control::ask(paths, request),
            Self::Http { server, token } => http::ask(server, token, request),
        }
    }

    /// A piece of the journal from there on, and where to go on. Without a server, files are enough: no
    /// daemon has to run.
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

    /// A piece of what a job printed, and where to go on.
    pub fn log(&self, job: &str, from: Place) -> Result<(Vec<u8>, Place), AgentError> {
        self.piece(&Request::Logs { job: job.into(), from })
    }

    fn piece(&self, request: &Request) -> Result<(Vec<u8>, Place), AgentError> {
        match self.ask(request)? {
            Reply::Piece { bytes, next } => Ok((bytes.into(), next)),
            _ => Err(AgentError::Refused {
                what: "the daemon answers something else".into(),
                hint: None,
            }),
        }
    }

    /// Waits until a daemon that was asked to end has ended.
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
