//! The journal: JSON lines that record everything that happened and was decided. It is the only
//! output of the core; replay, metrics, charts, reports and explanations are folds over it.
//!
//! One line each for the head, for every profile, team and job when it is registered, for every
//! step, and for the end. A file without an end line was truncated; everything before that is
//! valid. Only the journal of a live world has no end line while that world runs.
//!
//! ```text
//!  head │ profile team job ... │ step: time, facts, actions, reasons │ ... │ end
//!    │                            └──→ metrics · gantt · occupancy · explain   (folds)
//!    └────────────────────────────────→ replay: a fresh engine must decide the same
//! ```
//!
//! Invariants: lines are only added; floats read back exactly; every number in a line is checked
//! before a fold uses it as an index; a reader knows all versions before its own.

pub mod explain;
pub mod forecast;
pub mod gantt;
pub mod metrics;
pub mod occupancy;
pub mod replay;
pub mod timeline;

use crate::cluster::Cluster;
use crate::engine::{Engine, Step};
use crate::event::{Action, Event, Placement};
use crate::idx::{GpuIdx, JobIdx, NodeIdx, ProfileIdx, TeamIdx};
use crate::interference;
use crate::interference::table::Table;
use crate::job::Spec;
use crate::number::{Number, Positive};
use crate::performance::pairs::Extra;
use crate::performance::solo::Average;
use crate::policy::{self, Params, Policy, PolicyError};
use crate::profile::Profile;
use crate::reason::{Note, Reason};
use crate::state::Costs;
use crate::time::Time;
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, Write};

/// Version of the format that this code writes. It reads this and all earlier ones.
pub const VERSION: u32 = 1;

/// The `world` of a journal that may be continued: a real machine.
pub const LIVE: &str = "machine";
/// The same of a Kubernetes cluster.
pub const CLUSTER: &str = "kubernetes";

/// Bytes per line; no line that this code writes comes near this, so a longer one is not a journal.
const LONGEST_LINE: u64 = 64 << 20;

/// The first line: the configuration of the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Head {
    /// Version of the format.
    pub version: u32,
    /// The world that wrote it: `sim`, or a live world.
    pub world: String,
    /// Name of the policy.
    pub policy: String,
    /// All its parameters.
    pub params: Params,
    /// The cluster.
    pub cluster: Cluster,
    /// What changes cost in that world.
    pub costs: Costs,
    /// Seed of the policy's randomness.
    pub seed: u64,
    /// Known speeds of pairs of profiles that share a GPU, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub known_pairs: Option<Table>,
    /// What earlier runs learned, if anything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learned: Option<Learned>,
    /// Why an earlier part of the same journal was omitted; `None` if nothing was omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub continues: Option<String>,
    /// Names of the nodes, in the order of the cluster; empty where nodes have only numbers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<String>,
}

impl Head {
    /// The head of a run in this world; nothing is known of pairs, and no earlier part was left
    /// off.
    pub fn new(
        world: &str,
        (policy, params): (&str, Params),
        cluster: Cluster,
        costs: Costs,
        seed: u64,
    ) -> Self {
        Self {
            version: VERSION,
            world: world.into(),
            policy: policy.into(),
            params,
            cluster,
            costs,
            seed,
            known_pairs: None,
            learned: None,
            continues: None,
            nodes: Vec::new(),
        }
    }

    /// An engine that decides as this head says, with the policy of the registry.
    pub fn engine(&self) -> Result<Engine, PolicyError> {
        Ok(self.engine_with(policy::find(&self.policy)?.build(&self.params)?))
    }

    /// The same with a policy that is built already, or that is in no registry.
    pub fn engine_with(&self, policy: Box<dyn Policy>) -> Engine {
        let belief = interference::belief(self.known_pairs.clone());
        let mut engine = Engine::new(&self.cluster, self.costs, policy, belief, self.seed);
        engine.know_pairs(self.known_pairs.clone());
        if let Some(Learned { pairs, steps, lengths }) = &self.learned {
            let extra = |p: &LearnedPair| Extra { mean: p.extra.get(), samples: p.samples };
            let pairs = pairs.iter().map(|p| (p.gpu_model, p.own, p.other, extra(p)));
            let average = |s: &LearnedStep| {
                Average::of(s.step_s.get(), s.error.get(), s.samples.min(PAST_SAMPLES))
            };
            let steps = steps.iter().map(|s| (s.profile, s.gpu_model, average(s)));
            let lengths = lengths.iter().map(|(s, jobs)| (s.get(), *jobs));
            engine.begin_with(pairs, steps, lengths);
        }
        engine
    }
}

/// What earlier runs learned of kinds of work. Profiles are those of the lines that follow.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Learned {
    /// How much profiles slow each other on a shared GPU.
    pub pairs: Vec<LearnedPair>,
    /// Lengths of steps that no job file declares.
    pub steps: Vec<LearnedStep>,
    /// Lengths of finished jobs: seconds of undisturbed run, number of jobs.
    pub lengths: Vec<(Number, u32)>,
}

/// Samples of an earlier run count as this many at most: what is measured now counts more.
const PAST_SAMPLES: u32 = 4;

/// The length of a step alone on a GPU model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LearnedStep {
    /// The profile.
    pub profile: ProfileIdx,
    /// The GPU model (index into the cluster's models).
    pub gpu_model: u8,
    /// Seconds on the reference GPU.
    pub step_s: Positive,
    /// Standard error, relative to it.
    pub error: Number,
    /// Number of samples.
    pub samples: u32,
}

/// What a job of one profile suffers beside one of another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LearnedPair {
    /// The GPU model (index into the cluster's models).
    pub gpu_model: u8,
    /// Profile of the one that suffers.
    pub own: ProfileIdx,
    /// Profile of its roommate.
    pub other: ProfileIdx,
    /// Length of a step relative to alone, minus 1.
    pub extra: Number,
    /// Number of samples.
    pub samples: u32,
}

/// Registers a job: its name and what its user asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobLine {
    /// Its index.
    pub idx: JobIdx,
    /// Its name.
    pub name: String,
    /// What its user asked for.
    pub spec: Spec,
    /// Its owner, where jobs have one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Where it runs already when this journal begins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on: Option<Placement>,
}

impl JobLine {
    /// A job without an owner.
    pub fn new(idx: JobIdx, name: String, spec: Spec) -> Self {
        Self { idx, name, spec, owner: None, on: None }
    }
}

/// Registers a profile.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfileLine {
    /// Its index.
    pub idx: ProfileIdx,
    /// Its name.
    pub name: String,
    /// What is known of the profile.
    pub profile: Profile,
}

/// Registers a team.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TeamLine {
    /// Its index.
    pub idx: TeamIdx,
    /// Its name.
    pub name: String,
}

/// A step of the engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepLine {
    /// Time of the step.
    pub at: Time,
    /// Facts that the engine was given.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub facts: Vec<Event>,
    /// Actions that the engine asked of the world.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub actions: Vec<Action>,
    /// Reasons for decisions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<Note>,
    /// Whether the policy was called.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    pub asked: bool,
    /// The user whose request it was; what other facts the step has, it has by coincidence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
}

fn yes() -> bool {
    true
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde wants a reference")]
fn is_yes(v: &bool) -> bool {
    *v
}

/// A step as folds receive it, from a file or from an engine.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct StepView<'a> {
    /// Time of the step.
    pub at: Time,
    /// Facts that the engine was given.
    #[serde(skip_serializing_if = "<[Event]>::is_empty")]
    pub facts: &'a [Event],
    /// Actions that the engine asked of the world.
    #[serde(skip_serializing_if = "<[Action]>::is_empty")]
    pub actions: &'a [Action],
    /// Reasons for decisions.
    #[serde(skip_serializing_if = "<[Note]>::is_empty")]
    pub notes: &'a [Note],
    /// Whether the policy was called.
    #[serde(skip_serializing_if = "is_yes")]
    pub asked: bool,
    /// The user whose request it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by: Option<&'a str>,
}

impl<'a> StepView<'a> {
    /// A view of a step that an engine just made.
    pub fn of(at: Time, facts: &'a [Event], step: &Step<'a>) -> Self {
        Self { at, facts, actions: step.actions, notes: step.notes, asked: step.asked, by: None }
    }
}

/// A fold over a journal. Worlds feed it while they run; [`read`] feeds it from a file.
pub trait Observer {
    /// The head; comes first, once.
    fn head(&mut self, _head: &Head) {}
    /// A profile was registered.
    fn profile(&mut self, _line: &ProfileLine) {}
    /// A team was registered.
    fn team(&mut self, _line: &TeamLine) {}
    /// A job was registered.
    fn job(&mut self, _line: &JobLine) {}
    /// A step was made.
    fn step(&mut self, _step: &StepView<'_>) {}
    /// The run has ended.
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

/// Writes a journal to any writer that the edge supplies. It writes no line whose numbers a reader
/// would refuse; the first such line is its error.
pub struct Writer<W: Write> {
    to: W,
    failed: Option<io::Error>,
}

impl<W: Write> Writer<W> {
    /// A journal writer on `to`.
    pub fn new(to: W) -> Self {
        Self { to, failed: None }
    }

    /// Flushes everything, or returns the first error of the writer.
    pub fn finish(mut self) -> io::Result<W> {
        match self.failed {
            Some(e) => Err(e),
            None => self.to.flush().map(|()| self.to),
        }
    }

    fn line(&mut self, line: &Out<'_>) {
        self.checked_line(Ok(()), line);
    }

    /// Writes a line, unless something is wrong with it: what a reader would refuse, and then
    /// everything after it, must not be in a journal.
    fn checked_line(&mut self, check: Result<(), &'static str>, line: &Out<'_>) {
        if self.failed.is_none() {
            let written = check
                .map_err(|what| io::Error::new(io::ErrorKind::InvalidData, what))
                .and_then(|()| serde_json::to_writer(&mut self.to, line).map_err(io::Error::from));
            self.failed = written.and_then(|()| self.to.write_all(b"\n")).err();
        }
    }
}

fn check_time(at: Time) -> Result<(), &'static str> {
    if at <= Time::LATEST { Ok(()) } else { Err("a time of more than a thousand years") }
}

impl<W: Write> Observer for Writer<W> {
    fn head(&mut self, head: &Head) {
        self.line(&Out::Head(head));
    }
    fn profile(&mut self, line: &ProfileLine) {
        self.checked_line(line.profile.check(), &Out::Profile(line));
    }
    fn team(&mut self, line: &TeamLine) {
        self.line(&Out::Team(line));
    }
    fn job(&mut self, line: &JobLine) {
        self.checked_line(line.spec.check(), &Out::Job(line));
    }
    fn step(&mut self, step: &StepView<'_>) {
        self.checked_line(check_time(step.at), &Out::Step(step));
    }
    fn end(&mut self, at: Time) {
        self.line(&Out::End { at });
    }
}

/// Why a journal cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The file could not be read.
    #[error("line {line}: {error}")]
    Io {
        /// Line that was reached.
        line: u64,
        /// The error of the operating system.
        error: io::Error,
    },
    /// A line that is not valid in a journal.
    #[error("line {line}{}: {what}", column.map(|c| format!(", column {c}")).unwrap_or_default())]
    Bad {
        /// Number of the line.
        line: u64,
        /// The column, where known.
        column: Option<usize>,
        /// What is wrong with it.
        what: String,
    },
    /// The journal was written by a newer program.
    #[error("line 1: the journal has version {found}, this program reads up to {VERSION}")]
    Newer {
        /// Version of the journal.
        found: u64,
    },
    /// The end line is missing.
    #[error("line {line}: the journal was cut off: there is no end line")]
    CutOff {
        /// The last valid line.
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

/// Reads a journal that still grows, in pieces.
#[derive(Default)]
pub struct Reader {
    check: Check,
}

impl Reader {
    /// Feeds the next lines to an observer. Bytes after the last line are not read: they come again
    /// in front of the next piece. Returns how many were read.
    pub fn read(&mut self, piece: &[u8], to: &mut dyn Observer) -> Result<usize, JournalError> {
        let whole = piece.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
        for text in piece[..whole].split_inclusive(|b| *b == b'\n') {
            self.check.line += 1;
            if !text.iter().all(u8::is_ascii_whitespace) {
                self.check.take(text, to)?;
            }
        }
        Ok(whole)
    }
}

/// What a reader has read so far, to reject lines that cannot follow.
#[derive(Default)]
struct Check {
    line: u64,
    headed: bool,
    ended: bool,
    /// Whether the journal belongs to a live world, so that it may have no end line.
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
                self.goes_on = [LIVE, CLUSTER].contains(&head.world.as_str());
                (self.gpus, self.nodes) = (head.cluster.gpus(), head.cluster.nodes());
                let named = head.nodes.is_empty() || head.nodes.len() == self.nodes as usize;
                self.require(named, "another number of names than of nodes")?;
                to.head(&head);
            }
            In::Profile(p) => {
                self.require(p.idx.0 == self.profiles, "profiles are not numbered in order")?;
                let kind = p.profile.has_kind_before(p.idx);
                self.require(kind, "a profile of the kind of a later one")?;
                p.profile.check().map_err(|what| self.bad(None, what.into()))?;
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
                j.spec.check().map_err(|what| self.bad(None, what.into()))?;
                let exists = |on: &Placement| on.gpus.iter().all(|g| g.0 < self.gpus);
                self.require(
                    j.on.as_ref().is_none_or(exists),
                    "a job on a GPU that does not exist",
                )?;
                self.jobs += 1;
                to.job(&j);
            }
            In::Step(s) => {
                self.step(&s)?;
                let StepLine { at, facts, actions, notes, asked, by } = &s;
                let (at, asked, by) = (*at, *asked, by.as_deref());
                to.step(&StepView { at, facts, actions, notes, asked, by });
            }
            In::End { at } => {
                self.require(at >= self.at, "time runs backwards")?;
                self.ended = true;
                to.end(at);
            }
        }
        Ok(())
    }

    /// The version is read first, because a newer head may have other fields.
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

    /// Folds index by job, GPU and node, so an index that does not exist must not reach them.
    fn step(&mut self, s: &StepLine) -> Result<(), JournalError> {
        self.require(s.at >= self.at, "time runs backwards")?;
        check_time(s.at).map_err(|what| self.bad(None, what.into()))?;
        self.at = s.at;
        let job = |j: JobIdx| j.0 < self.jobs;
        let node = |n: NodeIdx| n.0 < self.nodes;
        let reason = |r: Reason| r.jobs().all(job) && r.nodes().all(node);
        let fact = |f: &Event| {
            f.job().is_none_or(job) && f.node().is_none_or(node) && f.reason().is_none_or(reason)
        };
        let action = |a: &Action| {
            let placed = |gpus: &[GpuIdx]| !gpus.is_empty() && gpus.iter().all(|g| g.0 < self.gpus);
            job(a.job()) && a.reason().is_none_or(reason) && a.gpus().is_none_or(placed)
        };
        let known = s.facts.iter().all(fact)
            && s.actions.iter().all(action)
            && s.notes.iter().all(|n| job(n.job) && reason(n.reason));
        self.require(known, "a job, GPU or node that does not exist")
    }
}

/// The message without serde's own "at line 1 column n"; our errors give the place themselves.
fn strip_place(e: &serde_json::Error) -> String {
    let text = e.to_string();
    text.split(" at line ").next().unwrap_or_default().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::number::Number;
    use crate::reason::Source;
    use crate::time::Span;

    struct Nothing;
    impl Observer for Nothing {}

    /// A journal of one GPU and one profile.
    fn begun() -> Writer<Vec<u8>> {
        let cluster = "1x1".parse().unwrap();
        let mut writer = Writer::new(Vec::new());
        let fifo = ("fifo", Params::new());
        writer.head(&Head::new("sim", fifo, cluster, Costs::default(), 0));
        let (idx, profile) = (ProfileIdx(0), Profile::of_step(1.0));
        writer.profile(&ProfileLine { idx, name: "work".into(), profile });
        writer
    }

    /// A journal of one GPU and one job, and of a step with these facts, actions and notes.
    fn journal(facts: &[Event], actions: &[Action], notes: &[Note]) -> Vec<u8> {
        let mut writer = begun();
        let spec = Spec::training(1, 1.0, ProfileIdx(0));
        writer.job(&JobLine::new(JobIdx(0), "a".into(), spec));
        writer.step(&StepView { at: Time::ZERO, facts, actions, notes, asked: true, by: None });
        writer.end(Time::ZERO);
        writer.finish().unwrap()
    }

    #[test]
    fn owner_and_actor_are_kept_and_told() {
        let mut writer = begun();
        let (job, spec) = (JobIdx(0), Spec::training(1, 1.0, ProfileIdx(0)));
        let owner = Some("alice".to_string());
        writer.job(&JobLine { owner, ..JobLine::new(job, "a".into(), spec) });
        for (fact, by) in [
            (Event::Submitted(job), Some("alice")),
            (Event::Started(job), None),
            (Event::Held { job, held: true }, Some("alice")),
            (Event::Cancelled(job), Some("root")),
        ] {
            let facts = &[fact];
            let (at, actions, notes) = (Time::ZERO, &[], &[]);
            writer.step(&StepView { at, facts, actions, notes, asked: false, by });
        }
        writer.end(Time::ZERO);
        let text = writer.finish().unwrap();
        let (mut again, mut told) = (Writer::new(Vec::new()), explain::Explain::new("a"));
        read(&text[..], &mut (&mut again, &mut told)).unwrap();
        assert_eq!(again.finish().unwrap(), text);
        let told: Vec<&str> = told.moments.iter().map(|m| m.what.as_str()).collect();
        assert!(told[0].starts_with("submitted by alice;"), "{told:?}");
        assert_eq!(told[1..], ["makes progress", "held by alice", "cancelled by root"]);
        let plain = String::from_utf8(journal(&[Event::Submitted(job)], &[], &[])).unwrap();
        assert!(!plain.contains("\"by\"") && !plain.contains("\"owner\""), "{plain}");
    }

    /// Every reason that names a job or a node.
    fn reasons(job: JobIdx, node: NodeIdx) -> [Reason; 18] {
        [
            Reason::Behind(job),
            Reason::PreemptedBy(job),
            Reason::ShrinksFor(job),
            Reason::TriedWith(job),
            Reason::NotWorthSharing(job),
            Reason::AtShare(job),
            Reason::PausedFor(job),
            Reason::HeldBackFor(job),
            Reason::NotHeldBackFor(job),
            Reason::Beside { job, pd_permille: 1000, source: Source::Thumb },
            Reason::BetterToWait { than_beside: job, saves: Span::ZERO },
            Reason::SharesWith { job, own_permille: 1, cost_permille: 1 },
            Reason::BetterAlone { than_beside: job, own_permille: 1, cost_permille: 1 },
            Reason::PushedOut { job, times_permille: 1 },
            Reason::First(job),
            Reason::ConfinedFor { job, permille: 1 },
            Reason::PromiseTo(job),
            Reason::NodeLost(node),
        ]
    }

    #[test]
    fn a_reason_that_names_an_unknown_job_is_refused() {
        let job = JobIdx(0);
        for (number, is_known) in [(0, true), (1, false)] {
            for reason in reasons(JobIdx(number), NodeIdx(number)) {
                let journals = [
                    journal(&[Event::Failed { job, reason, done: Number::default() }], &[], &[]),
                    journal(&[Event::Noted { job, reason }], &[], &[]),
                    journal(&[], &[Action::Reject(job, reason)], &[]),
                    journal(&[], &[], &[Note { job, reason }]),
                ];
                for text in journals {
                    let found = read(&text[..], &mut Nothing).map_err(|e| e.to_string());
                    let unknown = "line 4: a job, GPU or node that does not exist";
                    assert_eq!(found, if is_known { Ok(()) } else { Err(unknown.into()) });
                }
            }
        }
    }
}
