//! Requests as the threads of connections answer them: the verb is checked, files are read and
//! tokens are managed here; everything else is decided by the daemon's thread.

use crate::AgentError;
use crate::api::Call;
use crate::api::caller::{Caller, Mode, Scope};
use crate::api::connections::{Admission, Admitted};
use crate::api::control::{Draft, LARGE_REQUEST, LONGEST_PIECE, Reply, Request, Submit, Then};
use crate::api::dashboard::feed::Feed;
use crate::api::http::Site;
use crate::api::job_file::JobFile;
use crate::api::tokens::Tokens;
use crate::paths::Paths;
use crate::process::Deliver;
use crate::process::rotated_file::{Parts, Place};
use roommate_core::idx::TeamIdx;
use roommate_core::journal::explain::Explain;
use roommate_core::journal::forecast::{Forecast, Verdict};
use roommate_core::journal::{self, Reader};
use roommate_core::time::Time;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError, Weak, mpsc};
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
    /// What dashboards show, for each user and part of its rights.
    feeds: Mutex<BTreeMap<(u32, bool, Scope), Arc<Feed>>>,
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
        let (reads, feeds) = (Mutex::new(()), Mutex::default());
        Arc::new(Self { to, paths, mode, tokens, admission, large, reads, feeds })
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
            Request::WhatIf(submit) => self.foresee(&submit, caller),
            Request::Draft(draft) => match self.drafted(*draft) {
                Ok(request) => self.answer(request, caller),
                Err(refused) => refused,
            },
            Request::TokenCreate(wanted) => self.tokens.create(&caller, self.mode, *wanted),
            Request::TokenList {} => self.tokens.list(&caller),
            Request::TokenRevoke { id } => self.tokens.revoke(&caller, &id),
            request => self.decide(request, caller),
        }
    }

    /// The feed of a user.
    fn feed(self: &Arc<Self>, caller: &Caller) -> Arc<Feed> {
        let key = (caller.user.uid, caller.admin, caller.scope);
        let mut feeds = self.feeds.lock().unwrap_or_else(PoisonError::into_inner);
        let feed = feeds.entry(key).or_insert_with(|| {
            let (service, caller): (Weak<Self>, _) = (Arc::downgrade(self), caller.clone());
            Feed::new(Box::new(move |request| {
                let service = service.upgrade().ok_or_else(about_to_end)?;
                Ok(service.answer(request.clone(), caller.clone()))
            }))
        });
        Arc::clone(feed)
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

    /// What would become of a job, decided by an engine made of the journal.
    fn foresee(&self, submit: &Submit, caller: Caller) -> Reply {
        let trial = Submit { dry_run: true, ..submit.clone() };
        let checked = self.decide(Request::Submit(Box::new(trial)), caller.clone());
        let Reply::Done { .. } = checked else { return checked };
        let Reply::Machine(machine) = self.decide(Request::Machine {}, caller) else {
            return about_to_end().into();
        };
        let now = Time::from_secs(machine.up_s.get());
        let _turn = self.reads.lock().unwrap_or_else(PoisonError::into_inner);
        // A policy needs more stack than the threads of connections have.
        let judged = std::thread::scope(|scope| {
            let run = || judge(&self.paths.journal(), &submit.file, now);
            let thread = std::thread::Builder::new().name("what-if".into());
            let thread = thread.spawn_scoped(scope, run).map_err(|e| e.to_string())?;
            thread.join().unwrap_or_else(|_| Err("the policy could not decide".into()))
        });
        match judged {
            Ok(verdict) => Reply::Foreseen(Box::new(verdict)),
            Err(what) => Reply::Error { what, hint: None },
        }
    }

    /// The request of a draft. The job gets of the environment what finds programs.
    fn drafted(&self, draft: Draft) -> Result<Request, Reply> {
        let Draft { text, then, key, workdir } = draft;
        let usual = || std::env::var_os("HOME").filter(|_| !self.mode.is_system());
        let folder = workdir.or_else(|| usual().map(PathBuf::from)).filter(|f| f.is_absolute());
        let folder = folder.ok_or_else(|| {
            Reply::error("workdir: expected an absolute path", "say to which folder paths belong")
        })?;
        let file = JobFile::read(&text, &folder.join("job.yaml"));
        let file = file.map_err(|e| Reply::from(AgentError::from(e)))?;
        let passed = ["PATH", "HOME", "LANG"].map(String::from);
        let own = |name: String| Some((name.clone(), std::env::var(name).ok()?));
        let env = passed.into_iter().filter(|_| !self.mode.is_system()).filter_map(own).collect();
        let submit = Box::new(Submit { file, env, key, dry_run: then == Then::Check });
        Ok(if then == Then::Foresee { Request::WhatIf(submit) } else { Request::Submit(submit) })
    }

    /// Has the daemon's thread answer a request.
    fn decide(&self, request: Request, caller: Caller) -> Reply {
        let ends = || Reply::from(about_to_end());
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

/// What would become of a job that is submitted now, by the engine of a journal.
fn judge(journal: &Path, file: &JobFile, now: Time) -> Result<Verdict, String> {
    let mut forecast = Forecast::default();
    let text = std::fs::read(journal).map_err(|e| format!("could not read the journal: {e}"))?;
    Reader::default().read(&text, &mut forecast).map_err(|e| e.to_string())?;
    let spec = |profile| file.spec(profile, TeamIdx(0), now);
    forecast.ask(now, (file.name(), &file.kind()), file.profile(), spec)
}

fn about_to_end() -> AgentError {
    AgentError::Refused { what: "the daemon is about to end".into(), hint: None }
}

impl Site for Arc<Service> {
    fn caller(&self, token: &str) -> Option<Caller> {
        self.tokens.caller(token, self.mode)
    }

    fn refuses(&self, request: &Request, caller: &Caller) -> bool {
        caller.refusal(request, self.mode).is_some()
    }

    fn admit(&self, caller: &Caller, length: u64) -> Result<Vec<Admitted>, String> {
        let uid = caller.user.uid;
        let mut places = vec![self.admission.admit(uid)?];
        if length > LARGE_REQUEST {
            places.push(self.large.admit(uid)?);
        }
        Ok(places)
    }

    fn answer(&self, request: Request, caller: Caller) -> Reply {
        Service::answer(self, request, caller)
    }

    fn stream(&self, _: usize, caller: &Caller) -> Result<Receiver<Arc<str>>, AgentError> {
        self.feed(caller).join().map_err(|e| AgentError::Refused {
            what: format!("could not start a thread: {e}"),
            hint: None,
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
