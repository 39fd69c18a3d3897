//! The world of a cluster: what the API server says becomes facts, what the engine asks for becomes
//! writes. Pure and deterministic: it knows no clock and no network, so that the same code is tried
//! with a million random operations.
//!
//! ```text
//!              pod, node ─▶ observe ┐                    ┌▶ Write ─▶ API server
//!   API server                      ├▶ reconcile ⇄ Engine ┤             │
//!              answers ───▶ answer  ┘                    └▶ journal ◀───┘ answer
//! ```
//!
//! - A *work* is what the engine calls a job: a pod, or the pods of a gang.
//! - What a work is to do is the engine's phase of its job; what its pods do is what was observed
//!   last. [`reconcile`] compares the two and answers with writes and facts.
//! - One write of a pod is under way at a time. A write whose answer was lost is repeated until its
//!   outcome is known.
//! - No write leaves that the [`Ledger`] would not allow.

mod figures;
mod part;
mod queue;
mod rebuild;
mod reconcile;
mod room;
#[cfg(test)]
mod tests;

pub use figures::{Figures, NodeFigures, Pending, QueueFigures, TenantFigures};
pub use part::Shape;
pub use queue::{Grant, QueueReport};
pub(crate) use reconcile::gang_of;

use crate::assignment::{Applied, Assignment};
use crate::board::written::Outside;
use crate::constraint::selects;
use crate::ledger::{Hold, Ledger, Limits};
use crate::names;
use crate::objects::{Node, Pod, PodTerm};
use crate::request::Request;
use part::Part;
use queue::{Arrival, Queue};
use roommate_core::event::{Action, Event, Sample};
use roommate_core::idx::JobIdx;
use roommate_core::job::Phase;
use roommate_core::journal::{Observer as _, Writer};
use roommate_core::policy::{self, Params, PolicyError};
use roommate_core::profile::Profile;
use roommate_core::state::Costs;
use roommate_core::time::{Span, Time};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// What is known of a kind of work before it runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Expected {
    /// What the engine knows of it.
    pub profile: Profile,
    /// Memory of each GPU, MiB, of pods that do not say it; 0 = not known.
    pub mem_mib: u32,
}

/// How to schedule.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The policy.
    pub policy: String,
    /// Its parameters.
    pub params: Params,
    /// What changes cost, and the most pods on a GPU.
    pub costs: Costs,
    /// Seed of the policy's randomness.
    pub seed: u64,
    /// The resource of which pods ask one for each GPU.
    pub resource: String,
    /// The scheduler that pods name.
    pub scheduler: String,
    /// This scheduler's term as leader.
    pub term: u64,
    /// Bytes after which a journal is ended and another begun.
    pub most_journal: usize,
}

impl Settings {
    /// The usual settings with this policy.
    pub fn of(policy: &str) -> Self {
        Self {
            policy: policy.into(),
            params: Params::new(),
            costs: Costs { backoff: Span::from_secs(1.0), ..Costs::default() },
            seed: 1,
            resource: names::RESOURCE.into(),
            scheduler: names::SCHEDULER.into(),
            term: 1,
            most_journal: 64 << 20,
        }
    }

    pub(crate) fn all_params(&self) -> Result<Params, PolicyError> {
        policy::find(&self.policy)?.live_params(&self.params)
    }
}

/// A pod as a write names it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PodRef {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its unique id; a write to another pod of the same name fails.
    pub uid: String,
}

/// A write to the API server.
#[derive(Clone, Debug, PartialEq)]
pub enum Write {
    /// Bind a pod, with its assignment.
    Bind {
        /// The pod.
        pod: PodRef,
        /// The node.
        node: String,
        /// The annotation.
        assignment: String,
    },
    /// Replace the assignment of a pod that is bound.
    Assign {
        /// The pod.
        pod: PodRef,
        /// The annotation.
        assignment: String,
    },
    /// Evict a pod; it has its grace period to save its progress.
    Evict {
        /// The pod.
        pod: PodRef,
        /// Why, for its condition.
        why: String,
    },
    /// Say why a pod waits. Not answered.
    Explain {
        /// The pod.
        pod: PodRef,
        /// Why.
        why: String,
    },
}

impl Write {
    /// The pod that it is about.
    pub fn pod(&self) -> &PodRef {
        match self {
            Self::Bind { pod, .. }
            | Self::Assign { pod, .. }
            | Self::Evict { pod, .. }
            | Self::Explain { pod, .. } => pod,
        }
    }
}

/// The answer to a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It was written.
    Done,
    /// It was not and will not be: the pod is gone, is another one, or may not be changed so.
    Refused,
    /// It was not written now; later it may be.
    Later,
    /// Nobody knows whether it was written.
    Lost,
}

/// What is under way for a pod.
#[derive(Clone, Debug, PartialEq)]
enum Under {
    Bind { node: String, assignment: Assignment },
    Assign { assignment: Assignment },
    Evict,
}

/// A pod as it was observed last, and what is under way for it.
#[derive(Clone, Debug)]
struct Known {
    pod: Pod,
    request: Option<Result<Request, String>>,
    assignment: Option<Assignment>,
    applied: Option<Applied>,
    work: Option<u32>,
    under: Option<Under>,
    /// Whether the write that is under way was handed out.
    sent: bool,
    /// What was written and not observed yet.
    assumed: Option<(String, Assignment)>,
    evicted: bool,
    /// Whether it was told what is wrong with what it asks.
    told_wrong: bool,
}

impl Known {
    /// Its node, observed or written.
    fn node(&self) -> Option<&str> {
        self.pod.spec.node_name.as_deref().or(self.assumed.as_ref().map(|a| a.0.as_str()))
    }

    /// Its assignment, observed or written.
    fn now(&self) -> Option<&Assignment> {
        self.assumed.as_ref().map(|a| &a.1).or(self.assignment.as_ref())
    }

    fn is_deleting(&self) -> bool {
        self.pod.metadata.deletion_timestamp.is_some()
    }

    /// Whether another scheduler, or a person, bound it.
    fn is_taken(&self) -> bool {
        self.node().is_some() && self.now().is_none()
    }

    /// Whether it runs or can run, as far as it is for us.
    fn is_alive(&self) -> bool {
        !self.pod.has_ended() && !self.is_deleting() && !self.evicted && !self.is_taken()
    }

    /// Whether its processes are on a node where we sent it, or may be.
    fn holds(&self) -> bool {
        let bound = self.node().is_some() && self.now().is_some();
        !self.pod.has_ended() && (bound || matches!(self.under, Some(Under::Bind { .. })))
    }

    /// The most of each GPU that its user allows it.
    fn limit_permille(&self) -> u16 {
        let percent = self.pod.annotation(names::LIMIT).and_then(|t| t.parse::<f64>().ok());
        let percent = percent.filter(|p| (1.0..=100.0).contains(p)).unwrap_or(100.0);
        (percent * 10.0).round() as u16
    }

    fn is_gated(&self) -> bool {
        self.pod.spec.scheduling_gates.as_ref().is_some_and(|gates| !gates.is_empty())
    }

    /// What the ledger has to hold for it: all that it may have, whatever becomes of the write that
    /// is under way.
    fn hold(&self) -> Option<Hold> {
        if self.pod.has_ended() {
            return None;
        }
        let is = self.node().zip(self.now()).map(|(node, a)| Hold::of(node, a));
        match (&self.under, is) {
            (Some(Under::Bind { node, assignment }), None) => Some(Hold::of(node, assignment)),
            (Some(Under::Assign { assignment }), Some(is)) => {
                let will = Hold::of(&is.node, assignment);
                Some(Hold {
                    share_permille: is.share_permille.max(will.share_permille),
                    mem_mib: is.mem_mib.max(will.mem_mib),
                    ..is
                })
            }
            (_, is) => is,
        }
    }
}

/// Where a pod of a work goes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Slot {
    node: String,
    gpus: Vec<u16>,
    pod: Option<String>,
}

/// A pod or a gang.
#[expect(clippy::struct_excessive_bools, reason = "each says something else of one work")]
#[derive(Clone, Debug)]
struct Work {
    /// Its name in journals.
    name: String,
    /// Its gang, by namespace and name.
    gang: Option<(String, String)>,
    /// Who makes its pods, if anybody does: it makes others when they are gone.
    owner: Option<String>,
    /// Its pods, by unique id.
    pods: BTreeSet<String>,
    /// Its pods that have ended well.
    succeeded: u32,
    /// Pods that it needs.
    size: u16,
    job: Option<JobIdx>,
    request: Option<Request>,
    slots: Vec<Slot>,
    /// Whether it is suspended, or will be.
    suspended: bool,
    /// When it is evicted if its agents have not suspended it.
    suspend_by: Option<Time>,
    /// Whether it could not be started as decided.
    bounced: bool,
    /// Whether a node of it was lost.
    lost: bool,
    /// When it came, for the order within its queue.
    arrived: Arrival,
    /// Why its queue has to give back what it has.
    reclaimed: Option<String>,
    /// No attempt before.
    not_before: Time,
    tries: u32,
    since: Time,
    explained: Option<(Time, String)>,
    /// It is forgotten once its pods are gone.
    over: bool,
}

impl Work {
    /// Ends it, and its job if that is not over.
    fn finish(&mut self, phase: Option<Phase>, leaving: &mut Vec<Event>) {
        let ends = |phase| !matches!(phase, Phase::Expected | Phase::BackingOff | Phase::Done);
        if let (Some(job), false) = (self.job, self.over)
            && phase.is_some_and(ends)
        {
            leaving.push(Event::Finished(job));
        }
        self.over = true;
    }
}

/// A node as it was observed last.
#[derive(Clone, Debug)]
struct KnownNode {
    node: Node,
    shape: Option<Shape>,
    up: bool,
    /// What pods that are not ours need, CPU in thousandths of a core and MiB.
    foreign: (u64, u64),
}

/// What the scheduler counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Bindings that were written.
    pub bound: u64,
    /// Evictions that were written.
    pub evicted: u64,
    /// Assignments that were changed.
    pub changed: u64,
    /// Writes that were refused.
    pub refused: u64,
    /// Parts begun.
    pub parts: u64,
    /// Facts that the engine could not believe.
    pub contradictions: u64,
    /// Writes that the ledger did not allow yet.
    pub held_back: u64,
}

/// The world of a cluster.
pub struct World {
    settings: Settings,
    nodes: BTreeMap<String, KnownNode>,
    pods: HashMap<String, Known>,
    works: Vec<Option<Work>>,
    /// Places of works that were forgotten.
    free: Vec<u32>,
    by_gang: BTreeMap<(String, String), u32>,
    /// Works without pods that wait for others of their owner, oldest first.
    headless: BTreeMap<String, Vec<u32>>,
    /// Pods that a gang needs, as its `PodGroup` says.
    group_sizes: BTreeMap<(String, String), u16>,
    /// Pods that may not have certain others near, by unique id.
    repelling: BTreeMap<String, (String, Vec<PodTerm>)>,
    /// What is known of kinds of work before they run, by name.
    profiles: BTreeMap<String, Expected>,
    /// Queues that an administrator made, or that pods name.
    queues: BTreeMap<String, Queue>,
    /// When it is looked at the queues, if they need it.
    queue_look: Option<Time>,
    /// What queues gave back a moment ago, and when.
    given_back: Vec<(Time, u64)>,
    /// Works that came so far.
    arrivals: u64,
    ledger: Ledger,
    part: Option<Part>,
    /// Why another part is needed, and from when on.
    new_part: Option<(Time, String)>,
    dirty: BTreeSet<u32>,
    timers: BTreeSet<(Time, u32)>,
    /// Works whose pods wait for room in the ledger, by node.
    blocked: BTreeMap<String, BTreeSet<u32>>,
    ups: Vec<Event>,
    downs: Vec<Event>,
    rooms: BTreeSet<String>,
    writes: Vec<Write>,
    now: Time,
    decisions: u64,
    counts: Counts,
}

/// How long after the first change of nodes a new part is begun: nodes come in crowds.
const GATHER: Span = Span(100_000);
/// How long a work waits before its pods are told why.
const EXPLAIN_AFTER: Span = Span(300_000);
/// How often pods are told the same.
const EXPLAIN_EVERY: Span = Span(30_000_000);
/// How long a work without pods waits for others of its owner.
const FORGET_AFTER: Span = Span(600_000_000);
/// The first pause after a refused write; doubles up to ten times as long.
const BACKOFF: Span = Span(1_000_000);

impl World {
    /// A cluster of which nothing is known yet.
    pub fn new(settings: Settings) -> Result<Self, PolicyError> {
        policy::find(&settings.policy)?.build(&settings.params)?;
        Ok(Self {
            settings,
            nodes: BTreeMap::new(),
            pods: HashMap::new(),
            works: Vec::new(),
            free: Vec::new(),
            by_gang: BTreeMap::new(),
            headless: BTreeMap::new(),
            group_sizes: BTreeMap::new(),
            repelling: BTreeMap::new(),
            profiles: BTreeMap::new(),
            queues: BTreeMap::new(),
            queue_look: None,
            given_back: Vec::new(),
            arrivals: 0,
            ledger: Ledger::default(),
            part: None,
            new_part: None,
            dirty: BTreeSet::new(),
            timers: BTreeSet::new(),
            blocked: BTreeMap::new(),
            ups: Vec::new(),
            downs: Vec::new(),
            rooms: BTreeSet::new(),
            writes: Vec::new(),
            now: Time::ZERO,
            decisions: 0,
            counts: Counts::default(),
        })
    }

    /// The ledger.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// What was counted.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// The journal of the current part: `roommate replay` decides it again.
    pub fn journal(&self) -> Vec<u8> {
        self.part.as_ref().map(Part::journal).unwrap_or_default()
    }

    /// What waits and the engine does not know of.
    pub(crate) fn outside(&self) -> impl Iterator<Item = Outside> {
        let waits = |work: &&Work| work.job.is_none() && !work.over;
        self.works.iter().flatten().filter(waits).filter_map(|work| {
            let (name, since_s) = (work.name.clone(), work.since.secs());
            let gpus = work.request.as_ref()?.gpus.saturating_mul(work.size);
            let why = work.explained.as_ref()?.1.clone();
            Some(Outside { name, gpus, since_s, why })
        })
    }

    /// Looks at it where it is.
    pub(crate) fn read_journal(&self, read: &mut dyn FnMut(&[u8])) {
        if let Some(part) = &self.part {
            part.read_journal(read);
        }
    }

    /// The same with an end line that says how late it is: nothing may have happened for long.
    pub fn snapshot(&self, now: Time) -> Vec<u8> {
        let mut journal = self.journal();
        if !journal.is_empty() {
            let mut end = Writer::new(&mut journal);
            end.end(now.max(self.now));
            end.finish().expect("memory can always be written to");
        }
        journal
    }

    /// When [`Self::step`] is due at the latest, if nothing is observed before.
    pub fn due(&self) -> Option<Time> {
        let timer = self.timers.first().map(|(at, _)| *at);
        let wake = self.part.as_ref().and_then(|p| p.wake);
        let part = self.new_part.as_ref().map(|(at, _)| *at);
        [timer, wake, part, self.queue_look].into_iter().flatten().min()
    }

    /// A pod is new or has changed.
    pub fn pod(&mut self, pod: Pod) {
        let uid = pod.uid().to_string();
        if uid.is_empty() {
            return;
        }
        let ours = pod.spec.scheduler_name.as_deref() == Some(&self.settings.scheduler);
        let mut known = self.pods.remove(&uid).unwrap_or_else(|| Known {
            request: ours.then(|| Request::of(&pod, &self.settings.resource)),
            pod: Pod::default(),
            assignment: None,
            applied: None,
            work: None,
            under: None,
            sent: false,
            assumed: None,
            evicted: false,
            told_wrong: false,
        });
        let measured_before = known.pod.annotation(names::MEASURED).map(String::from);
        let limit_before = known.limit_permille();
        self.count_foreign(&known, false);
        let gates = |pod: &Pod| pod.spec.scheduling_gates.clone();
        // The constraints of a pod may change only as long as it is gated.
        if ours && known.pod.uid() == uid && gates(&known.pod) != gates(&pod) {
            known.request = Some(Request::of(&pod, &self.settings.resource));
            known.told_wrong = false;
        }
        known.assignment = Assignment::of(&pod);
        if let Some(assignment) = known.assignment.as_ref().filter(|_| ours) {
            // A term is never reused, even if the Lease that counts them was deleted.
            self.settings.term = self.settings.term.max(assignment.term);
            self.decisions = self.decisions.max(assignment.decision);
        }
        known.applied = Applied::of(&pod);
        known.pod = pod;
        known.notice();
        self.count_foreign(&known, true);
        let repels = known.repels().filter(|_| !known.pod.has_ended());
        match repels {
            Some(terms) => {
                let namespace = known.pod.namespace().to_string();
                self.repelling.insert(uid.clone(), (namespace, terms));
            }
            None => drop(self.repelling.remove(&uid)),
        }
        let measured = known.pod.annotation(names::MEASURED).map(String::from);
        let (limit, work) = (known.limit_permille(), known.work);
        if limit != limit_before
            && let Some(job) = work.and_then(|w| self.works[w as usize].as_ref()?.job)
        {
            self.ups.push(Event::Resized { job, batch: None, share_permille: Some(limit % 1000) });
        }
        self.ledger_set(&uid, known.hold());
        self.pods.insert(uid.clone(), known);
        if ours {
            self.join(&uid);
        }
        if measured != measured_before
            && let Some(text) = measured
        {
            self.measured(&uid, &text);
        }
    }

    /// A pod is gone.
    pub fn pod_gone(&mut self, uid: &str) {
        let Some(known) = self.pods.remove(uid) else { return };
        self.count_foreign(&known, false);
        self.repelling.remove(uid);
        self.ledger_set(uid, None);
        if let Some(work) = known.work {
            if let Some(Some(of)) = self.works.get_mut(work as usize) {
                of.pods.remove(uid);
                of.succeeded += u32::from(known.pod.phase() == "Succeeded");
            }
            self.dirty.insert(work);
        }
    }

    /// A node is new or has changed.
    pub fn node(&mut self, node: Node) {
        let name = node.name().to_string();
        let enough = u32::from(self.settings.costs.max_tenants);
        let shape = Shape::of(&node, &self.settings.resource).filter(|s| s.slots >= enough);
        let up = node.is_ready() && shape.as_ref().is_some_and(Shape::is_usable);
        if let Some(shape) = &shape {
            let limits = Limits { gpus: shape.gpus, mem_mib: shape.mem_mib, pods: enough };
            self.ledger.set_node(&name, limits);
        }
        let was = self.nodes.remove(&name);
        let foreign = was.as_ref().map_or((0, 0), |w| w.foreign);
        let was_up = was.as_ref().is_some_and(|w| w.up);
        let selects = |n: &Node| (n.metadata.labels.clone(), n.taints());
        let selected_anew = was.as_ref().is_none_or(|w| selects(&w.node) != selects(&node));
        let known = KnownNode { node, shape, up, foreign };
        self.nodes.insert(name.clone(), known);
        self.fit_node(&name, was_up, selected_anew);
    }

    /// A node is gone.
    pub fn node_gone(&mut self, name: &str) {
        let Some(was) = self.nodes.get_mut(name) else { return };
        let was_up = std::mem::take(&mut was.up);
        was.shape = None;
        self.fit_node(name, was_up, false);
        self.nodes.remove(name);
    }

    /// A `PodGroup` says how many pods its gang needs.
    pub fn group(&mut self, namespace: &str, name: &str, size: u16) {
        let key = (namespace.to_string(), name.to_string());
        if self.group_sizes.insert(key.clone(), size) != Some(size)
            && let Some(work) = self.by_gang.get(&key)
        {
            self.dirty.insert(*work);
        }
    }

    /// What is known of a kind of work, or is no longer.
    pub fn profile(&mut self, name: &str, expected: Option<Expected>) {
        let same = self.profiles.get(name) == expected.as_ref();
        match expected {
            Some(expected) => drop(self.profiles.insert(name.into(), expected)),
            None => drop(self.profiles.remove(name)),
        }
        // An engine learns of a kind of work once, when its first pods come.
        if !same && self.part.as_ref().is_some_and(|part| part.knows(name)) {
            self.want_part(self.now + GATHER, "what is known of a kind of work has changed");
        }
    }

    /// All kinds of work of which something is known were listed anew.
    pub fn profiles_listed(&mut self, names: &BTreeSet<String>) {
        let gone: Vec<String> =
            self.profiles.keys().filter(|name| !names.contains(*name)).cloned().collect();
        gone.iter().for_each(|name| self.profile(name, None));
    }

    /// All pods were listed anew: what is not among them is gone.
    pub fn pods_listed(&mut self, uids: &BTreeSet<String>) {
        let mut gone: Vec<String> =
            self.pods.keys().filter(|uid| !uids.contains(*uid)).cloned().collect();
        gone.sort_unstable();
        gone.iter().for_each(|uid| self.pod_gone(uid));
    }

    /// The same of nodes.
    pub fn nodes_listed(&mut self, names: &BTreeSet<String>) {
        let gone: Vec<String> =
            self.nodes.keys().filter(|name| !names.contains(*name)).cloned().collect();
        gone.iter().for_each(|name| self.node_gone(name));
    }

    /// Pods and nodes that are known.
    pub fn known(&self) -> (usize, usize) {
        (self.pods.len(), self.nodes.len())
    }

    /// The answer to a write; `same` is the write.
    pub fn answer(&mut self, same: &Write, answer: Answer) {
        let uid = same.pod().uid.clone();
        let Some(known) = self.pods.get_mut(&uid) else { return };
        let Some(under) = known.under.clone().filter(|_| known.sent) else { return };
        let work = known.work;
        match answer {
            Answer::Done => {
                (known.under, known.sent) = (None, false);
                match under {
                    Under::Bind { node, assignment } => {
                        self.counts.bound += 1;
                        known.assumed = Some((node, assignment));
                    }
                    Under::Assign { assignment } => {
                        self.counts.changed += 1;
                        let node = known.node().unwrap_or_default().to_string();
                        known.assumed = Some((node, assignment));
                    }
                    Under::Evict => {
                        self.counts.evicted += 1;
                        known.evicted = true;
                    }
                }
                known.notice();
            }
            Answer::Refused => {
                self.counts.refused += 1;
                (known.under, known.sent) = (None, false);
                if let Some(work) = work {
                    self.refused(work, &under);
                }
            }
            // Handed out again a moment later.
            Answer::Later | Answer::Lost => {
                known.sent = false;
                let pause = if answer == Answer::Later { BACKOFF } else { Span(BACKOFF.0 / 2) };
                if let Some(work) = work {
                    self.timers.insert((self.now + pause, work));
                }
            }
        }
        let hold = self.pods.get(&uid).and_then(Known::hold);
        self.ledger_set(&uid, hold);
        if answer == Answer::Done
            && let Some(work) = work
        {
            self.dirty.insert(work);
        }
    }

    /// Decides; returns what is to be written, in this order. Time never runs backwards.
    pub fn step(&mut self, now: Time) -> Vec<Write> {
        self.now = now;
        while let Some(&(at, work)) = self.timers.first().filter(|(at, _)| *at <= now) {
            self.timers.remove(&(at, work));
            self.dirty.insert(work);
        }
        if self.part.as_ref().is_some_and(|p| p.length() > self.settings.most_journal) {
            self.want_part(Time::ZERO, "its journal had become long");
        }
        if let Some((_, why)) = self.new_part.take_if(|(at, _)| *at <= now) {
            self.rebuild(&why);
        }
        // Each round does what the one before asked for; a round that asks for nothing is the last.
        for _ in 0..MOST_ROUNDS {
            let due = self.part.as_ref().and_then(|p| p.wake).is_some_and(|at| at <= now);
            let facts = self.gather();
            if facts.is_empty() && !due {
                if self.dirty.is_empty() {
                    break;
                }
                continue;
            }
            // Without nodes nobody decides; pods were told so.
            let Some(part) = &mut self.part else { break };
            let (actions, contradictions) = part.step(now, &facts);
            self.counts.contradictions += contradictions as u64;
            for action in actions {
                self.act(&action);
            }
        }
        std::mem::take(&mut self.writes)
    }

    /// Facts of all that changed: arrivals after departures, so that nothing is given away twice.
    fn gather(&mut self) -> Vec<Event> {
        let mut facts = std::mem::take(&mut self.ups);
        let mut arriving = Vec::new();
        // What a fact of this round changes is looked at in the next one.
        for work in std::mem::take(&mut self.dirty) {
            self.reconcile(work, &mut facts, &mut arriving);
        }
        self.serve_queues();
        for name in std::mem::take(&mut self.rooms) {
            facts.extend(self.room_of(&name));
        }
        facts.append(&mut self.downs);
        facts.append(&mut arriving);
        facts
    }

    fn act(&mut self, action: &Action) {
        let Some(part) = &self.part else { return };
        let Some(work) = part.works.get(action.job().0 as usize).copied() else { return };
        self.decisions += 1;
        self.dirty.insert(work);
        let places: Option<Vec<(String, u16)>> = action.gpus().map(|gpus| {
            gpus.iter().map(|g| part.place(*g)).map(|(node, n)| (node.to_string(), n)).collect()
        });
        let Some(Some(of)) = self.works.get_mut(work as usize) else { return };
        self.rooms.extend(of.slots.iter().map(|slot| slot.node.clone()));
        match action {
            Action::Start(..) | Action::Move(..) => {
                of.suspended = false;
                of.lay(&places.unwrap_or_default());
            }
            Action::Suspend(_) => of.suspended = true,
            Action::Stop(_) => of.suspended = false,
            Action::Tune(..) => {}
            Action::Reject(_, reason) => {
                let why = reason.describe(&|job| format!("{}", job.0));
                of.explained = None;
                self.explain(work, &why);
            }
        }
    }

    fn phase(&self, work: u32) -> Option<Phase> {
        let job = self.works.get(work as usize)?.as_ref()?.job?;
        Some(self.part.as_ref()?.engine.state().job(job).phase)
    }

    fn ledger_set(&mut self, uid: &str, hold: Option<Hold>) {
        if self.ledger.of(uid) == hold.as_ref() {
            return;
        }
        let node = self.ledger.of(uid).map(|h| h.node.clone());
        self.ledger.set(uid, hold);
        self.rooms.extend(node.iter().chain(self.ledger.of(uid).map(|h| &h.node)).cloned());
        // Somebody may have waited for this.
        if let Some(waiting) = node.and_then(|n| self.blocked.remove(&n)) {
            self.dirty.extend(waiting);
        }
    }

    /// Why no pod with these labels may be bound: a pod that is there would not have it near.
    fn repelled(&self, pod: &Pod) -> Option<String> {
        let empty = BTreeMap::new();
        let labels = pod.metadata.labels.as_ref().unwrap_or(&empty);
        let by = |namespace: &str, term: &PodTerm| {
            let named = term.namespaces.as_deref().unwrap_or_default();
            let own = named.is_empty() && namespace == pod.namespace();
            let near = own
                || term.namespace_selector.is_some()
                || named.iter().any(|n| n == pod.namespace());
            near && selects(term.label_selector.as_ref(), labels)
        };
        let found = self.repelling.iter().find(|(uid, (namespace, terms))| {
            uid.as_str() != pod.uid() && terms.iter().any(|term| by(namespace, term))
        })?;
        let other = self.pods.get(found.0)?;
        let name = format!("{}/{}", other.pod.namespace(), other.pod.name());
        Some(format!("pod {name} has a required anti-affinity to it, which is not implemented"))
    }

    /// What the agent measured of a pod.
    fn measured(&mut self, uid: &str, text: &str) {
        let Ok(sample) = serde_json::from_str::<Sample>(text) else { return };
        let Some(work) = self.pods.get(uid).and_then(|k| k.work) else { return };
        if self.phase(work) == Some(Phase::Running)
            && let Some(job) = self.works[work as usize].as_ref().and_then(|w| w.job)
        {
            self.ups.push(Event::Sampled { job, sample });
        }
    }
}

/// Most rounds of a step; the rest is done at the next one.
const MOST_ROUNDS: u32 = 64;

impl Known {
    /// Forgets what was assumed once it was observed.
    fn notice(&mut self) {
        let Some((node, assumed)) = &self.assumed else { return };
        let seen = self.pod.spec.node_name.as_ref() == Some(node);
        let newest = |a: &Assignment| a.applied() >= assumed.applied();
        if seen && self.assignment.as_ref().is_some_and(newest) {
            self.assumed = None;
        }
    }

    /// Its required anti-affinity.
    fn repels(&self) -> Option<Vec<PodTerm>> {
        let affinity = self.pod.spec.affinity.as_ref()?.pod_anti_affinity.as_ref()?;
        affinity.required_during_scheduling_ignored_during_execution.clone()
    }

    fn named(&self) -> PodRef {
        PodRef {
            namespace: self.pod.namespace().into(),
            name: self.pod.name().into(),
            uid: self.pod.uid().into(),
        }
    }
}

impl Work {
    /// Lays its slots over these GPUs, each pod's on one node. Pods that are at one of the places
    /// keep it.
    fn lay(&mut self, places: &[(String, u16)]) {
        let each = self.request.as_ref().map_or(1, |r| usize::from(r.gpus)).max(1);
        let before = std::mem::take(&mut self.slots);
        for gpus in places.chunks(each) {
            let node = gpus[0].0.clone();
            let gpus: Vec<u16> = gpus.iter().map(|(_, n)| *n).collect();
            self.slots.push(Slot { node, gpus, pod: None });
        }
        let mut rest = Vec::new();
        for old in before {
            let same = |s: &&mut Slot| s.pod.is_none() && s.node == old.node && s.gpus == old.gpus;
            match self.slots.iter_mut().find(same) {
                Some(slot) => slot.pod = old.pod,
                None => rest.extend(old.pod),
            }
        }
        // The others have to leave their places before they can be at these.
        let free = self.slots.iter_mut().filter(|s| s.pod.is_none());
        free.zip(rest).for_each(|(slot, pod)| slot.pod = Some(pod));
    }
}
