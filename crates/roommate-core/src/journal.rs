//! The journal: JSON lines that say everything that happened and was decided. It is the only thing
//! that leaves the core; replay, metrics, pictures, reports and explanations are folds over it.
//!
//! One line each for the head, every profile, team and job when it becomes known, every step, and the
//! end. A file without an end line was cut off; everything before the cut is still good. Only the journal
//! of a live world has none as long as that world goes on.
//!
//! ```text
//!  head │ profile team job ... │ step: time, facts, actions, reasons │ ... │ end
//!    │                            └──→ metrics · gantt · occupancy · explain   (folds)
//!    └────────────────────────────────→ replay: a fresh engine must decide the same
//! ```
//!
//! Invariants: lines are only added; floats read back exactly; every number in a line is checked before a
//! fold uses it as an index; a reader knows all versions before its own.

pub mod explain;
pub mod gantt;
pub mod metrics;
pub mod occupancy;
pub mod replay;

use crate::cluster::Cluster;
use crate::engine::Step;
use crate::event::{Action, Event, Placement};
use crate::idx::{JobIdx, ProfileIdx, TeamIdx};
use crate::interference::table::Table;
use crate::job::Spec;
use crate::profile::Profile;
use crate::reason::{Note, Reason};
use crate::state::Costs;
use crate::time::Time;
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, Write};

/// Version of the format that this code writes. It reads this one and all before it.
pub const VERSION: u32 = 1;

/// What made a journal that may go on: a real machine.
pub const LIVE: &str = "machine";

/// No line of ours comes near this; a longer one is not a journal.
const LONGEST_LINE: u64 = 64 << 20;

/// The first line: what was run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Head {
    /// Version of the format.
    pub version: u32,
    /// What made it: `sim`, or a live world.
    pub world: String,
    /// The policy.
    pub policy: String,
    /// All its parameters.
    pub params: serde_json::Map<String, serde_json::Value>,
    /// The cluster.
    pub cluster: Cluster,
    /// What changes cost.
    pub costs: Costs,
    /// Seed of the policy's randomness.
    pub seed: u64,
    /// What the policy knows of pairs of profiles that share a GPU, if anything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub known_pairs: Option<Table>,
    /// Reason an earlier part of the same journal was left off; nothing if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub continues: Option<String>,
}

/// A line about a job: what the user asked for, under which name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobLine {
    /// Its index.
    pub idx: JobIdx,
    /// Its name.
    pub name: String,
    /// What was asked for.
    pub spec: Spec,
}

/// A line about a profile.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfileLine {
    /// Its index.
    pub idx: ProfileIdx,
    /// Its name.
    pub name: String,
    /// What is known.
    pub profile: Profile,
}

/// A line about a team.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TeamLine {
    /// Its index.
    pub idx: TeamIdx,
    /// Its name.
    pub name: String,
}

/// A line about a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepLine {
    /// When.
    pub at: Time,
    /// What happened.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub facts: Vec<Event>,
    /// What was asked of the world.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub actions: Vec<Action>,
    /// Reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<Note>,
    /// Whether the policy was asked.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub asked: bool,
}

fn yes() -> bool {
    true
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants a reference")]
fn is_yes(v: &bool) -> bool {
    *v
}

/// A step as folds see it, whether it comes from a file or from an engine.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct StepView<'a> {
    /// When.
    pub at: Time,
    /// What happened.
    #[serde(skip_serializing_if = "<[Event]>::is_empty")]
    pub facts: &'a [Event],
    /// What was asked of the world.
    #[serde(skip_serializing_if = "<[Action]>::is_empty")]
    pub actions: &'a [Action],
    /// Reason.
    #[serde(skip_serializing_if = "<[Note]>::is_empty")]
    pub notes: &'a [Note],
    /// Whether the policy was asked.
    #[serde(skip_serializing_if = "is_yes")]
    pub asked: bool,
}

impl<'a> StepView<'a> {
    /// The view of a step that an engine just made.
    pub fn of(at: Time, facts: &'a [Event], step: &Step<'a>) -> Self {
        Self { at, facts, actions: step.actions, notes: step.notes, asked: step.asked }
    }
}

/// Something that folds over a journal. Worlds feed it while they run; [`read`] feeds it from a file.
pub trait Observer {
    /// The head; comes first, once.
    fn head(&mut self, _head: &Head) {}
    /// A profile became known.
    fn profile(&mut self, _line: &ProfileLine) {}
    /// A team became known.
    fn team(&mut self, _line: &TeamLine) {}
    /// A job became known.
    fn job(&mut self, _line: &JobLine) {}
    /// A step was made.
    fn step(&mut self, _step: &StepView<'_>) {}
    /// The run is over.
    fn end(&mut self, _at: Time) {}
}

/// Two observers of one run.
impl<A: Observer, B: Observer> Observer for (A, B) {
    fn head(&mut self, head: &Head) {
        self.0.head(head);
        self.1.head(head);
    }
    fn profile(&mut self, line: &ProfileLine) {
        self.0.profile(line);
        self.1.profile(line);
    }
    fn team(&mut self, line: &TeamLine) {
        self.0.team(line);
        self.1.team(line);
    }
    fn job(&mut self, line: &JobLine) {
        self.0.job(line);
        self.1.job(line);
    }
    fn step(&mut self, step: &StepView<'_>) {
        self.0.step(step);
        self.1.step(step);
    }
    fn end(&mut self, at: Time) {
        self.0.end(at);
        self.1.end(at);
    }
}

impl<A: Observer + ?Sized> Observer for &mut A {
    fn head(&mut self, head: &Head) {
        (**self).head(head);
    }
    fn profile(&mut self, line: &ProfileLine) {
        (**self).profile(line);
    }
    fn team(&mut self, line: &TeamLine) {
        (**self).team(line);
    }
    fn job(&mut self, line: &JobLine) {
        (**self).job(line);
    }
    fn step(&mut self, step: &StepView<'_>) {
        (**self).step(step);
    }
    fn end(&mut self, at: Time) {
        (**self).end(at);
    }
}

impl<A: Observer> Observer for Option<A> {
    fn head(&mut self, head: &Head) {
        self.iter_mut().for_each(|o| o.head(head));
    }
    fn profile(&mut self, line: &ProfileLine) {
        self.iter_mut().for_each(|o| o.profile(line));
    }
    fn team(&mut self, line: &TeamLine) {
        self.iter_mut().for_each(|o| o.team(line));
    }
    fn job(&mut self, line: &JobLine) {
        self.iter_mut().for_each(|o| o.job(line));
    }
    fn step(&mut self, step: &StepView<'_>) {
        self.iter_mut().for_each(|o| o.step(step));
    }
    fn end(&mut self, at: Time) {
        self.iter_mut().for_each(|o| o.end(at));
    }
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Out<'a> {
    Head(&'a Head),
    Profile(&'a ProfileLine),
    Team(&'a TeamLine),
    Job(&'a JobLine),
    Step(&'a StepView<'a>),
    End { at: Time },
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum In {
    Head(Head),
    Profile(ProfileLine),
    Team(TeamLine),
    Job(JobLine),
    Step(StepLine),
    End { at: Time },
}

/// Writes a journal to wherever the edge says.
pub struct Writer<W: Write> {
    to: W,
    failed: Option<io::Error>,
}

impl<W: Write> Writer<W> {
    /// A writer of a journal.
    pub fn new(to: W) -> Self {
        Self { to, failed: None }
    }

    /// Everything is written, or the first thing that went wrong.
    pub fn finish(mut self) -> io::Result<W> {
        match self.failed {
            Some(e) => Err(e),
            None => self.to.flush().map(|()| self.to),
        }
    }

    fn line(&mut self, line: &Out<'_>) {
        if self.failed.is_none() {
            let written = serde_json::to_writer(&mut self.to, line).map_err(io::Error::from);
            self.failed = written.and_then(|()| self.to.write_all(b"\n")).err();
        }
    }
}

impl<W: Write> Observer for Writer<W> {
    fn head(&mut self, head: &Head) {
        self.line(&Out::Head(head));
    }
    fn profile(&mut self, line: &ProfileLine) {
        self.line(&Out::Profile(line));
    }
    fn team(&mut self, line: &TeamLine) {
        self.line(&Out::Team(line));
    }
    fn job(&mut self, line: &JobLine) {
        self.line(&Out::Job(line));
    }
    fn step(&mut self, step: &StepView<'_>) {
        self.line(&Out::Step(step));
    }
    fn end(&mut self, at: Time) {
        self.line(&Out::End { at });
    }
}

/// Reason a journal cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The file itself.
    #[error("line {line}: {error}")]
    Io {
        /// Line reached.
        line: u64,
        /// What the system said.
        error: io::Error,
    },
    /// A line that does not belong in a journal.
    #[error("line {line}{}: {what}", column.map(|c| format!(", column {c}")).unwrap_or_default())]
    Bad {
        /// The line.
        line: u64,
        /// The column, where known.
        column: Option<usize>,
        /// What is wrong.
        what: String,
    },
    /// Written by a newer program.
    #[error("line 1: the journal has version {found}, this program reads up to {VERSION}")]
    Newer {
        /// Its version.
        found: u64,
    },
    /// The last line is missing.
    #[error("line {line}: the journal was cut off: there is no end line")]
    CutOff {
        /// The last good line.
        line: u64,
    },
}

/// Feeds a journal to an observer, line by line.
pub fn read(mut from: impl BufRead, to: &mut dyn Observer) -> Result<(), JournalError> {
    let mut text = Vec::new();
    let mut check = Check::default();
    let mut blank = true;
    loop {
        text.clear();
        let line = check.line + 1;
        let got = io::Read::take(&mut from, LONGEST_LINE).read_until(b'\n', &mut text);
        let got = got.map_err(|error| JournalError::Io { line, error })? as u64;
        if got == 0 {
            break;
        }
        check.line = line;
        if got == LONGEST_LINE {
            return Err(check.bad(None, "the line is too long for a journal".into()));
        }
        if text.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        blank = false;
        check.take(&text, to)?;
    }
    if blank {
        return Err(JournalError::Bad { line: 1, column: None, what: "the file is empty".into() });
    }
    let whole = check.ended || check.goes_on;
    if whole { Ok(()) } else { Err(JournalError::CutOff { line: check.line }) }
}

/// What a reader has seen, to refuse what cannot follow.
#[derive(Default)]
struct Check {
    line: u64,
    headed: bool,
    ended: bool,
    /// Whether it is of a world that may go on.
    goes_on: bool,
    profiles: u32,
    teams: u32,
    jobs: u32,
    gpus: u32,
    nodes: u32,
    at: Time,
}

impl Check {
    fn bad(&self, column: Option<usize>, what: String) -> JournalError {
        JournalError::Bad { line: self.line, column, what }
    }

    fn require(&self, holds: bool, what: &str) -> Result<(), JournalError> {
        if holds { Ok(()) } else { Err(self.bad(None, what.into())) }
    }

    fn take(&mut self, text: &[u8], to: &mut dyn Observer) -> Result<(), JournalError> {
        if !self.headed {
            self.version(text)?;
        }
        self.require(!self.ended, "there is something after the end line")?;
        let parsed = serde_json::from_slice(text);
        let line: In = parsed.map_err(|e| self.bad(Some(e.column()), strip_place(&e)))?;
        match line {
            In::Head(head) => {
                self.require(!self.headed, "a second head")?;
                self.headed = true;
                self.goes_on = head.world == LIVE;
                (self.gpus, self.nodes) = (head.cluster.gpus(), head.cluster.nodes());
                to.head(&head);
            }
            In::Profile(p) => {
                self.require(p.idx.0 == self.profiles, "profiles are not numbered in order")?;
                let positive = |v: f64| v.is_finite() && v > 0.0;
                let speeds = p.profile.model_speed.iter().all(|(_, s)| positive(*s));
                let sane = positive(p.profile.step_s) && positive(p.profile.spread_speed) && speeds;
                self.require(sane, "a profile with a time or speed that is not above 0")?;
                let scales = p.profile.scaling.is_none_or(|s| (0.0..=2.0).contains(&s));
                self.require(scales, "a profile whose scaling is not from 0 to 2")?;
                self.profiles += 1;
                to.profile(&p);
            }
            In::Team(t) => {
                self.require(t.idx.0 == self.teams, "teams are not numbered in order")?;
                self.teams += 1;
                to.team(&t);
            }
            In::Job(j) => {
                self.require(j.idx.0 == self.jobs, "jobs are not numbered in order")?;
                self.require(j.spec.profile.0 < self.profiles, "a job of an unknown profile")?;
                let sizes = j.spec.gpus > 0 && j.spec.gpus_max >= j.spec.gpus;
                self.require(sizes, "a job without GPUs")?;
                let work = j.spec.work.is_none_or(|w| w.is_finite() && w >= 0.0);
                self.require(work, "a job with a negative amount of work")?;
                self.jobs += 1;
                to.job(&j);
            }
            In::Step(s) => {
                self.step(&s)?;
                let StepLine { at, facts, actions, notes, asked } = &s;
                to.step(&StepView { at: *at, facts, actions, notes, asked: *asked });
            }
            In::End { at } => {
                self.require(at >= self.at, "time runs backwards")?;
                self.ended = true;
                to.end(at);
            }
        }
        Ok(())
    }

    /// The version is read before anything else: a newer head may look different.
    fn version(&self, text: &[u8]) -> Result<(), JournalError> {
        #[derive(Deserialize)]
        struct Peek {
            head: Option<Version>,
        }
        #[derive(Deserialize)]
        struct Version {
            version: Option<u64>,
        }
        let peek = serde_json::from_slice::<Peek>(text).ok().and_then(|p| p.head);
        match peek.and_then(|h| h.version) {
            None => Err(self.bad(None, "this is not a Roommate journal: it has no head".into())),
            Some(found) if found > u64::from(VERSION) => Err(JournalError::Newer { found }),
            Some(_) => Ok(()),
        }
    }

    /// Folds index by job, GPU and node; a number that does not exist must not reach them.
    fn step(&mut self, s: &StepLine) -> Result<(), JournalError> {
        self.require(s.at >= self.at, "time runs backwards")?;
        self.require(s.at <= Time::LATEST, "a time of more than a thousand years")?;
        self.at = s.at;
        let job = |j: &JobIdx| j.0 < self.jobs;
        let reason = |w: &Reason| match w {
            Reason::Behind(j) | Reason::PreemptedBy(j) | Reason::ShrinksFor(j) => job(j),
            Reason::TriedWith(j) | Reason::NotWorthSharing(j) | Reason::AtShare(j) => job(j),
            Reason::PausedFor(j) | Reason::Beside { job: j, .. } => job(j),
            Reason::BetterToWait { than_beside, .. } => job(than_beside),
            Reason::NodeLost(n) => n.0 < self.nodes,
            _ => true,
        };
        let fact = |f: &Event| match f {
            Event::NodeUp(n) | Event::NodeDown(n) => n.0 < self.nodes,
            Event::Submitted(j) | Event::Started(j) | Event::Tuned(j) => job(j),
            Event::Finished(j) | Event::Cancelled(j) => job(j),
            Event::Stopped { job: j, .. } | Event::Sampled { job: j, .. } => job(j),
            Event::Served { job: j, .. } => job(j),
            Event::Failed { job: j, reason: w, .. } => job(j) && reason(w),
        };
        let gpus = |p: &Placement| !p.gpus.is_empty() && p.gpus.iter().all(|g| g.0 < self.gpus);
        let action = |a: &Action| match a {
            Action::Start(j, p) | Action::Move(j, p) => job(j) && gpus(p),
            Action::Reject(j, w) => job(j) && reason(w),
            Action::Stop(j) | Action::Suspend(j) | Action::Tune(j, _) => job(j),
        };
        let known = s.facts.iter().all(fact)
            && s.actions.iter().all(action)
            && s.notes.iter().all(|n| job(&n.job) && reason(&n.reason));
        self.require(known, "a job, GPU or node that does not exist")
    }
}

/// The message without serde's own "at line 1 column n": we say the place ourselves.
fn strip_place(e: &serde_json::Error) -> String {
    let text = e.to_string();
    text.split(" at line ").next().unwrap_or_default().to_string()
}
