//! The feed of a daemon: one look a second for all viewers who see the same, sent to each of them.
//!
//! A look asks for what everybody may ask: the machine, the jobs, and the journal where that is
//! allowed. What changed is written once, as one message. Without viewers nobody looks.

use crate::AgentError;
use crate::api::control::{JobView, MachineView, Reply, Request};
use crate::api::dashboard::recent::Recent;
use crate::process::rotated_file::Place;
use roommate_core::journal::Reader;
use roommate_core::journal::timeline::{Line, Timeline};
use roommate_core::number::Number;
use serde::Serialize;
use std::collections::BTreeMap;
use std::mem;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Time between looks.
const EVERY: Duration = Duration::from_secs(1);
/// Messages that wait for a viewer at most; one who does not keep up is disconnected, and comes
/// again.
const MOST_UNSENT: usize = 32;
/// Most jobs that have ended of which a page is told.
const MOST_ENDED: usize = 200;

/// How a daemon is asked.
pub(crate) type Ask = Box<dyn Fn(&Request) -> Result<Reply, AgentError> + Send + Sync>;

/// The feed of all who see the same.
pub(crate) struct Feed {
    ask: Ask,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    viewers: Vec<SyncSender<Arc<str>>>,
    /// Whether a thread looks.
    looking: bool,
    journal: Journal,
    machine: Option<serde_json::Value>,
    now_s: f64,
    jobs: BTreeMap<u32, JobView>,
}

/// The journal as far as it was read.
#[derive(Default)]
struct Journal {
    place: Place,
    reader: Reader,
    timeline: Timeline,
    recent: Recent,
    /// What was read of a line that is not whole.
    rest: Vec<u8>,
    /// Why it cannot be read.
    refused: Option<String>,
}

/// A job as pages are told of it: they count its age themselves, and need neither paths nor
/// processes.
fn row(view: JobView) -> JobView {
    let age_s = if view.ended { view.age_s } else { Number::of(0.0) };
    JobView { age_s, log: String::new(), pid: None, keeper_pid: None, stages_s: None, ..view }
}

/// A message to viewers.
#[derive(Serialize)]
struct Message<'a> {
    /// The daemon's time in seconds.
    now_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    machine: Option<&'a serde_json::Value>,
    #[serde(skip_serializing_if = "<[Line]>::is_empty")]
    lines: &'a [Line],
    #[serde(skip_serializing_if = "Vec::is_empty")]
    jobs: Vec<&'a JobView>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    gone: Vec<u32>,
    /// Why there is no history.
    #[serde(skip_serializing_if = "Option::is_none")]
    no_journal: Option<&'a str>,
    /// Why the daemon does not answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    lost: Option<String>,
}

impl<'a> Message<'a> {
    fn at(now_s: f64) -> Self {
        let (machine, lines, no_journal, lost) = (None, [].as_slice(), None, None);
        Self { now_s, machine, lines, jobs: Vec::new(), gone: Vec::new(), no_journal, lost }
    }

    fn is_empty(&self) -> bool {
        let quiet = self.machine.is_none() && self.lines.is_empty() && self.lost.is_none();
        quiet && self.jobs.is_empty() && self.gone.is_empty()
    }

    fn text(&self) -> Arc<str> {
        serde_json::to_string(self).expect("a message can always be written").into()
    }
}

impl Feed {
    pub(crate) fn new(ask: Ask) -> Arc<Self> {
        Arc::new(Self { ask, seen: Mutex::new(Seen::default()) })
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new viewer: first all that holds, then what changes.
    pub(crate) fn join(self: &Arc<Self>) -> std::io::Result<Receiver<Arc<str>>> {
        let mut seen = self.seen();
        if !seen.looking {
            // Whoever looked before has stopped, so what is known may be old.
            self.look(&mut seen);
            let feed = Arc::clone(self);
            let thread = std::thread::Builder::new().name("feed".into());
            thread.spawn(move || feed.keep_looking())?;
            seen.looking = true;
        }
        let (to, from) = sync_channel(MOST_UNSENT);
        let lines = seen.journal.recent.lines();
        let all = Message {
            machine: seen.machine.as_ref(),
            lines: &lines,
            jobs: seen.jobs.values().collect(),
            no_journal: seen.journal.refused.as_deref(),
            ..Message::at(seen.now_s)
        };
        let _ = to.try_send(all.text());
        seen.viewers.push(to);
        Ok(from)
    }

    fn keep_looking(self: Arc<Self>) {
        loop {
            std::thread::sleep(EVERY);
            let mut seen = self.seen();
            if let Some(news) = self.look(&mut seen) {
                seen.viewers.retain(|viewer| viewer.try_send(Arc::clone(&news)).is_ok());
            }
            if seen.viewers.is_empty() {
                seen.looking = false;
                return;
            }
        }
    }

    /// Takes in what changed; returns the message that says it.
    fn look(&self, seen: &mut Seen) -> Option<Arc<str>> {
        let (machine, jobs) = match self.machine().and_then(|m| Ok((m, self.jobs()?))) {
            Ok(both) => both,
            Err(error) => {
                let lost = Some(error.to_string());
                return Some(Message { lost, ..Message::at(seen.now_s) }.text());
            }
        };
        self.read_journal(&mut seen.journal);
        let lines = mem::take(&mut seen.journal.timeline.lines);
        lines.iter().for_each(|line| seen.journal.recent.add(line.clone()));
        seen.now_s = machine.up_s.get();
        seen.journal.recent.forget(seen.now_s);
        let machine = shown(machine);
        let is_new = seen.machine.as_ref() != Some(&machine);
        seen.machine = Some(machine);
        let (changed, gone) = seen.take_jobs(jobs);
        let message = Message {
            machine: seen.machine.as_ref().filter(|_| is_new),
            lines: &lines,
            jobs: changed.iter().map(|idx| &seen.jobs[idx]).collect(),
            gone,
            ..Message::at(seen.now_s)
        };
        (!message.is_empty()).then(|| message.text())
    }

    fn machine(&self) -> Result<MachineView, AgentError> {
        match (self.ask)(&Request::Machine {})? {
            Reply::Machine(machine) => Ok(*machine),
            other => Err(unexpected(other)),
        }
    }

    fn jobs(&self) -> Result<Vec<JobView>, AgentError> {
        match (self.ask)(&Request::Ps {})? {
            Reply::Jobs(jobs) => Ok(jobs),
            other => Err(unexpected(other)),
        }
    }

    fn read_journal(&self, journal: &mut Journal) {
        while journal.refused.is_none() {
            let piece = match (self.ask)(&Request::Journal { from: journal.place }) {
                Ok(Reply::Piece { bytes, next }) => (Vec::from(bytes), next),
                Ok(other) => return journal.refused = Some(unexpected(other).to_string()),
                Err(AgentError::Refused { what, .. }) => return journal.refused = Some(what),
                Err(_) => return,
            };
            let (bytes, next) = piece;
            if bytes.is_empty() {
                return;
            }
            journal.take(&bytes, next);
        }
    }
}

fn unexpected(reply: Reply) -> AgentError {
    match reply {
        Reply::Error { what, hint } => AgentError::Refused { what, hint },
        Reply::Busy { what } => AgentError::Busy { what },
        _ => AgentError::Refused { what: "unexpected reply from the daemon".into(), hint: None },
    }
}

/// The machine as viewers are told of it; without what changes all the time.
fn shown(machine: MachineView) -> serde_json::Value {
    let mut value = serde_json::to_value(machine).expect("a view can always be written");
    if let Some(fields) = value.as_object_mut() {
        for field in ["up_s", "rss_mib", "recent", "journal"] {
            fields.remove(field);
        }
    }
    value
}

impl Journal {
    fn take(&mut self, bytes: &[u8], next: Place) {
        if next.part != self.place.part {
            // A new part registers all its jobs again.
            (self.reader, self.rest) = (Reader::default(), Vec::new());
        }
        self.place = next;
        self.rest.extend_from_slice(bytes);
        match self.reader.read(&self.rest, &mut self.timeline) {
            Ok(read) => drop(self.rest.drain(..read)),
            Err(error) => self.refused = Some(format!("the journal cannot be read: {error}")),
        }
    }
}

impl Seen {
    /// Takes in the jobs; returns those that changed, and those that are no longer shown.
    fn take_jobs(&mut self, jobs: Vec<JobView>) -> (Vec<u32>, Vec<u32>) {
        let ended = jobs.iter().filter(|j| j.ended).count();
        let mut old = ended.saturating_sub(MOST_ENDED);
        let mut before = mem::take(&mut self.jobs);
        let mut changed = Vec::new();
        for job in jobs {
            if job.ended && old > 0 {
                old -= 1;
                continue;
            }
            let row = row(job);
            let idx = row.idx;
            if before.remove(&idx).as_ref() != Some(&row) {
                changed.push(idx);
            }
            self.jobs.insert(idx, row);
        }
        (changed, before.into_keys().collect())
    }
}
