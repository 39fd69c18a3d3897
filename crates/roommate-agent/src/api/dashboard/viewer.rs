//! The dashboard of a client: the page on this machine alone, of a daemon that is reached through
//! its socket or over HTTPS, or of journals.
//!
//! Requests of the page are carried out with the rights of the client. Whoever else can connect to
//! the port has no token, and gets nothing.

use crate::AgentError;
use crate::api::caller::{Caller, Mode};
use crate::api::client::Client;
use crate::api::connections::Admitted;
use crate::api::control::{self, Draft, Reply, Request, Submit, Then};
use crate::api::dashboard::feed::Feed;
use crate::api::http::{Http, Listening, Site};
use crate::api::job_file::JobFile;
use crate::api::tokens;
use crate::os::disk::RealDisk;
use crate::paths::Paths;
use roommate_core::journal::timeline::Line;
use serde::Serialize;
use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

/// Lines of a journal in one message.
const LINES_A_MESSAGE: usize = 4_000;

/// A journal that was read.
#[derive(Default)]
pub struct Recording {
    /// What it is called.
    pub title: String,
    /// What happened.
    pub lines: Vec<Line>,
    /// Its metrics, as rows.
    pub metrics: Vec<serde_json::Value>,
}

/// What is shown.
pub enum Shown {
    /// A daemon, and how its client makes a submission of a job file.
    Daemon(Client, Box<dyn Fn(JobFile) -> Submit + Send + Sync>),
    /// One journal, or several side by side.
    Journals(Vec<Recording>),
}

/// A page that is served until the process ends.
pub struct Viewer {
    listening: Listening,
    site: Arc<Viewed>,
}

/// What the page asks for.
struct Viewed {
    token: String,
    shown: Shown,
    feed: Mutex<Option<Arc<Feed>>>,
}

impl Viewer {
    /// Listens at an address of this machine; port 0 = any that is free.
    pub fn at(at: SocketAddr, shown: Shown) -> Result<Self, AgentError> {
        if !at.ip().is_loopback() {
            let what = format!("{} can be reached from other machines", at.ip());
            let hint = "use 127.0.0.1; `roommate up --http` serves the page to other machines";
            return Err(AgentError::refused(what, hint));
        }
        // The state is that of the certificate, and there is none.
        let listening = Listening::at(Http { at, plain: true }, &Paths::usual(), &RealDisk)?;
        let (token, feed) = (tokens::secret()?, Mutex::default());
        Ok(Self { listening, site: Arc::new(Viewed { token, shown, feed }) })
    }

    /// The address with the token, as a browser opens it. What is behind `#` is never sent.
    pub fn link(&self) -> String {
        format!("{}/#token={}", self.listening.url(), self.site.token)
    }

    /// Serves the page until the process ends.
    pub fn serve(self) {
        self.listening.serve(&self.site);
    }
}

/// A message with a part of a journal.
#[derive(Serialize)]
struct Part<'a> {
    /// The number of this journal, and how many there are.
    recording: (usize, usize),
    #[serde(skip_serializing_if = "Option::is_none")]
    title: Option<&'a str>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    metrics: &'a [serde_json::Value],
    lines: &'a [Line],
    /// Whether this is all.
    done: bool,
}

impl Recording {
    fn messages(&self, recording: (usize, usize)) -> Receiver<Arc<str>> {
        let parts = self.lines.chunks(LINES_A_MESSAGE).count();
        let (to, from) = sync_channel(parts.max(1));
        let mut chunks = self.lines.chunks(LINES_A_MESSAGE);
        for number in 0..parts.max(1) {
            let first = number == 0;
            let part = Part {
                recording,
                title: first.then_some(&self.title),
                metrics: if first { &self.metrics } else { &[] },
                lines: chunks.next().unwrap_or_default(),
                done: number + 1 >= parts,
            };
            let text = serde_json::to_string(&part).expect("a part can always be written");
            let _ = to.try_send(text.into());
        }
        from
    }
}

impl Viewed {
    fn relay(&self, request: Request) -> Result<Reply, AgentError> {
        let Shown::Daemon(client, prepare) = &self.shown else {
            let what = "a journal is over: nothing can be done to its jobs";
            return Err(AgentError::refused(what, "`roommate ui` shows a daemon"));
        };
        let Request::Draft(draft) = request else { return client.ask(&request) };
        let Draft { text, then, key, workdir } = *draft;
        let here = std::env::current_dir().unwrap_or_default();
        let folder = workdir.map_or_else(|| here.clone(), |folder| here.join(folder));
        let file = JobFile::read(&text, &folder.join("job.yaml"))?;
        let submit = Submit { key, dry_run: then == Then::Check, ..prepare(file) };
        client.ask(&match then {
            Then::Submit | Then::Check => Request::Submit(Box::new(submit)),
            Then::Foresee => Request::WhatIf(Box::new(submit)),
        })
    }
}

impl Site for Viewed {
    fn caller(&self, token: &str) -> Option<Caller> {
        tokens::same(self.token.as_bytes(), token.as_bytes()).then(Caller::this)
    }

    fn refuses(&self, request: &Request, caller: &Caller) -> bool {
        caller.refusal(request, Mode::User).is_some()
    }

    fn admit(&self, _: &Caller, _: u64) -> Result<Vec<Admitted>, String> {
        Ok(Vec::new())
    }

    fn answer(&self, request: Request, _: Caller) -> Reply {
        self.relay(request).unwrap_or_else(Reply::from)
    }

    fn stream(&self, number: usize, _: &Caller) -> Result<Receiver<Arc<str>>, AgentError> {
        match &self.shown {
            Shown::Journals(all) => {
                let of = all.len();
                let recording = all.get(number).ok_or_else(|| {
                    let what = format!("there is no journal {number}: there are {of}");
                    AgentError::Refused { what, hint: None }
                })?;
                Ok(recording.messages((number, of)))
            }
            Shown::Daemon(client, _) => {
                let mut feed = self.feed.lock().unwrap_or_else(PoisonError::into_inner);
                let feed = feed.get_or_insert_with(|| Feed::new(ask_with(client.clone())));
                feed.join().map_err(control::lost)
            }
        }
    }
}

/// A client that may read the journal's files reads them itself.
fn ask_with(client: Client) -> super::feed::Ask {
    Box::new(move |request| match request {
        Request::Journal { from } => {
            client.journal(*from).map(|(bytes, next)| Reply::Piece { bytes: bytes.into(), next })
        }
        other => client.ask(other),
    })
}
