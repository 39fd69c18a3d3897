//! Requests as the threads of connections answer them: the verb is checked, files are read and
//! tokens are managed here; everything else is decided by the daemon's thread.

use crate::AgentError;
use crate::api::Call;
use crate::api::caller::{Caller, Mode};
use crate::api::connections::Admission;
use crate::api::control::{LONGEST_PIECE, Reply, Request};
use crate::api::tokens::Tokens;
use crate::paths::Paths;
use crate::process::Deliver;
use crate::process::rotated_file::{Parts, Place};
use roommate_core::journal;
use roommate_core::journal::explain::Explain;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

/// How long the daemon may take to decide: it may be busy with its disk for a while. Less than a
/// client waits, which so learns the cause.
const DECIDE_WITHIN: Duration = Duration::from_secs(25);
/// Most connections of users at a time, each of which is a thread.
const MOST_CONNECTIONS: usize = 256;

/// Most large requests at a time, in all and of each user: each may take several MiB.
const MOST_LARGE: usize = 8;
const MOST_LARGE_EACH: usize = 4;

/// What connections of users share.
pub(crate) struct Service {
    pub(crate) to: Deliver<Call>,
    pub(crate) paths: Paths,
    pub(crate) mode: Mode,
    pub(crate) tokens: Tokens,
    pub(crate) admission: Arc<Admission>,
    /// Requests that take much memory.
    pub(crate) large: Arc<Admission>,
    /// Held while a journal is read.
    reads: Mutex<()>,
}

impl Service {
    pub(crate) fn new(
        to: Deliver<Call>,
        paths: Paths,
        mode: Mode,
        tokens: Tokens,
        most_each: usize,
    ) -> Arc<Self> {
        let admission = Admission::new("connections", MOST_CONNECTIONS, most_each);
        let large = Admission::new("large requests", MOST_LARGE, MOST_LARGE_EACH);
        let reads = Mutex::new(());
        Arc::new(Self { to, paths, mode, tokens, admission, large, reads })
    }

    /// Answers a request from the socket or from HTTP.
    pub(crate) fn answer(&self, request: Request, caller: Caller) -> Reply {
        if let Some(refusal) = caller.refusal(&request, self.mode) {
            return refusal;
        }
        match request {
            Request::Journal { from } => piece(&self.paths.journal(), from),
            Request::Logs { job, from } => match self.decide(Request::Describe { job }, caller) {
                Reply::Job(job) => piece(job.log.as_ref(), from),
                other => other,
            },
            Request::History { job } => self.history(&job, caller),
            Request::TokenCreate(wanted) => self.tokens.create(&caller, self.mode, *wanted),
            Request::TokenList {} => self.tokens.list(&caller),
            Request::TokenRevoke { id } => self.tokens.revoke(&caller, &id),
            request => self.decide(request, caller),
        }
    }

    /// The history of a job that the caller sees. Jobs of others are not named in it.
    fn history(&self, name: &str, caller: Caller) -> Reply {
        let admin = caller.admin;
        let described = self.decide(Request::Describe { job: name.into() }, caller);
        let Reply::Job(job) = described else { return described };
        // Journals are long: one is read at a time, so that readers do not slow the daemon.
        let _turn = self.reads.lock().unwrap_or_else(PoisonError::into_inner);
        let mut moments = Vec::new();
        for path in Parts::new(self.paths.journal()).paths() {
            let explain = Explain::new(name);
            let mut part = if admin { explain } else { explain.only_of(&job.owner.name) };
            let read = File::open(&path).map_err(|e| e.to_string()).and_then(|file| {
                journal::read(BufReader::new(file), &mut part).map_err(|e| e.to_string())
            });
            // The last line of the part that grows may be half written.
            if let Err(why) = read
                && !part.found()
                && path == self.paths.journal()
            {
                let what = format!("could not read the daemon's journal: {why}");
                return Reply::Error { what, hint: None };
            }
            moments.append(&mut part.moments);
        }
        Reply::History(moments)
    }

    /// Has the daemon's thread answer a request.
    fn decide(&self, request: Request, caller: Caller) -> Reply {
        let ends = || Reply::Error { what: "the daemon is about to end".into(), hint: None };
        let (answer, answered) = mpsc::channel();
        if !(self.to)(Call { request, caller, answer }) {
            return ends();
        }
        answered.recv_timeout(DECIDE_WITHIN).unwrap_or_else(|why| match why {
            RecvTimeoutError::Disconnected => ends(),
            RecvTimeoutError::Timeout => Reply::error(
                format!("the daemon did not decide within {} s", DECIDE_WITHIN.as_secs()),
                "it is busy, perhaps with its disk; `roommate ps` shows what it did",
            ),
        })
    }
}

/// A piece of a rotated file.
fn piece(path: &Path, from: Place) -> Reply {
    match Parts::new(path).read(from, LONGEST_PIECE) {
        Ok((bytes, next)) => Reply::Piece { bytes: bytes.into(), next },
        Err(e) => AgentError::file("read", path)(e).into(),
    }
}
