//! The feed of a daemon: one look a second for all viewers who see the same, sent to each of them.
//!
//! A look asks for what everybody may ask: the machine, the jobs, and the journal where that is
//! allowed. What changed is written once, as one message. Without viewers nobody looks.

use crate::AgentError;
use crate::api::control::{JobView, MachineView, Reply, Request};
use crate::api::dashboard::recent::Recent;
use crate::process::rotated_file::Place;
use roommate_core::journal::forecast::Forecast;
use roommate_core::journal::timeline::{Line, Timeline};
use roommate_core::journal::{Observer, Reader};
use roommate_core::number::Number;
use roommate_core::time::Time;
use serde::Serialize;
use std::collections::BTreeMap;
use std::mem;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Time between looks.
const EVERY: Duration = Duration::from_secs(1);
/// Looks without news after which viewers are told the time.
const QUIET_LOOKS: u32 = 10;
/// Time between forecasts of the queue, at least.
const FORESEE_EVERY: Duration = Duration::from_secs(5);
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
    /// Seconds until jobs that wait would start, when that was asked last.
    starts: BTreeMap<String, Number>,
}

/// The journal as far as it was read.
#[derive(Default)]
struct Journal {
    pieces: Pieces,
    timeline: Timeline,
    recent: Recent,
    /// Why it cannot be read.
    refused: Option<String>,
}

/// A reader of the part of the journal that grows, in the pieces in which it is answered.
struct Pieces {
    place: Place,
    reader: Reader,
    /// What was read of a line that is not whole.
    rest: Vec<u8>,
}

impl Default for Pieces {
    fn default() -> Self {
        // Behind all earlier parts comes the one that grows.
        let place = Place { part: u64::MAX, at: 0 };
        Self { place, reader: Reader::default(), rest: Vec::new() }
    }
}

impl Pieces {
    /// Reads all that has been written since.
    fn read(&mut self, ask: &Ask, to: &mut dyn Observer) -> Result<(), AgentError> {
        loop {
            let (bytes, next) = match ask(&Request::Journal { from: self.place })? {
                Reply::Piece { bytes, next } => (Vec::from(bytes), next),
                other => return Err(unexpected(other)),
            };
            if bytes.is_empty() {
                return Ok(());
            }
            if next.part != self.place.part {
                // A new part registers all its jobs again.
                (self.reader, self.rest) = (Reader::default(), Vec::new());
            }
            self.place = next;
            self.rest.extend(bytes);
            let read = self.reader.read(&self.rest, to).map_err(|error| {
                let what = format!("the journal cannot be read: {error}");
                AgentError::Refused { what, hint: None }
            })?;
            self.rest.drain(..read);
        }
    }
}

/// A job as pages are told of it: they count its age themselves, and need neither paths nor
/// processes.
fn row(view: JobView) -> JobView {
    let age_s = if view.ended { view.age_s } else { Number::of(0.0) };
    JobView { age_s, log: String::new(), pid: None, keeper_pid: None, stages_s: None, ..view }
}

/// When to ask again when jobs start that wait.
#[derive(Default)]
struct Foresight {
    waiting: Vec<u32>,
    next: Option<Instant>,
}

impl Foresight {
    fn is_due(&mut self, waiting: Vec<u32>) -> bool {
        let rested = self.next.is_none_or(|next| Instant::now() >= next);
        let due = rested && !(waiting.is_empty() && self.waiting.is_empty());
        if due {
            self.waiting = waiting;
        }
        due
    }

    /// A long journal takes long to read again, so it is read less often.
    fn took(&mut self, time: Duration) {
        self.next = Some(Instant::now() + FORESEE_EVERY.max(time * 200));
    }
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
    #[serde(skip_serializing_if = "Option::is_none")]
    starts: Option<&'a BTreeMap<String, Number>>,
    /// Why there is no history.
    #[serde(skip_serializing_if = "Option::is_none")]
    no_journal: Option<&'a str>,
    /// Why the daemon does not answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    lost: Option<String>,
}

impl Message<'_> {
    fn at(now_s: f64) -> Self {
        let (machine, lines, starts, no_journal, lost) = (None, [].as_slice(), None, None, None);
        let (jobs, gone) = (Vec::new(), Vec::new());
        Self { now_s, machine, lines, jobs, gone, starts, no_journal, lost }
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
            starts: Some(&seen.starts).filter(|starts| !starts.is_empty()),
            no_journal: seen.journal.refused.as_deref(),
            ..Message::at(seen.now_s)
        };
        let _ = to.try_send(all.text());
        seen.viewers.push(to);
        Ok(from)
    }

    fn keep_looking(self: Arc<Self>) {
        let (mut foresight, mut quiet) = (Foresight::default(), 0);
        loop {
            std::thread::sleep(EVERY);
            let mut seen = self.seen();
            quiet += 1;
            let news = self.look(&mut seen).or_else(|| {
                // Who has left is found out by sending something.
                (quiet >= QUIET_LOOKS).then(|| Message::at(seen.now_s).text())
            });
            if news.is_some() {
                quiet = 0;
            }
            seen.send(news);
            if seen.viewers.is_empty() {
                seen.looking = false;
                return;
            }
            let (waiting, now_s) = (seen.waiting(), seen.now_s);
            let may = seen.journal.refused.is_none();
            drop(seen);
            if may && foresight.is_due(waiting) {
                let began = Instant::now();
                let starts = self.foresee(now_s);
                foresight.took(began.elapsed());
                let mut seen = self.seen();
                let news = starts.filter(|starts| *starts != seen.starts).map(|starts| {
                    seen.starts = starts;
                    Message { starts: Some(&seen.starts), ..Message::at(now_s) }.text()
                });
                seen.send(news);
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
        if journal.refused.is_some() {
            return;
        }
        // Whatever else happens, happens to other requests too.
        let read = journal.pieces.read(&self.ask, &mut journal.timeline);
        if let Err(AgentError::Refused { what, .. }) = read {
            journal.refused = Some(what);
        }
    }

    /// Seconds until jobs that wait would start.
    fn foresee(&self, now_s: f64) -> Option<BTreeMap<String, Number>> {
        let mut forecast = Forecast::default();
        Pieces::default().read(&self.ask, &mut forecast).ok()?;
        forecast.starts(Time::from_secs(now_s)).ok()
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

impl Seen {
    /// Sends a message to all viewers who keep up.
    fn send(&mut self, news: Option<Arc<str>>) {
        if let Some(news) = news {
            self.viewers.retain(|viewer| viewer.try_send(Arc::clone(&news)).is_ok());
        }
    }

    /// Jobs that wait.
    fn waiting(&self) -> Vec<u32> {
        let waits = |job: &&JobView| !job.ended && job.devices.is_empty();
        self.jobs.values().filter(waits).map(|job| job.idx).collect()
    }

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
