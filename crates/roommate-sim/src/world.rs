//! The simulated world: virtual GPUs, a true model of speed, and an event heap.
//!
//! Event-driven: nothing happens between events, progress is computed when it is asked for, and an
//! alarm that no longer holds is recognised by its epoch instead of being searched and removed.
//! Costs are charged when the thing that costs happens, never otherwise (but see
//! [`roommate_core::state::Charge::EveryStep`], which some published simulators need).

mod pace;
mod service;

use crate::fault::{FaultSource, Faults};
use crate::serving::requests::Requests;
use crate::serving::{Measuring, Services};
use roommate_core::cluster::Cluster;
use roommate_core::engine::Engine;
use roommate_core::event::{Action, Event, Sample};
use roommate_core::idx::{GpuSet, Idx, IdxSet, IdxVec, JobIdx, NodeIdx, ProfileIdx, TeamIdx};
use roommate_core::interference::Interference;
use roommate_core::interference::table::Table;
use roommate_core::job::{Class, Spec};
use roommate_core::journal::{Head, JobLine, Observer, ProfileLine, StepView, TeamLine};
use roommate_core::performance::goodput;
use roommate_core::performance::progress::Meter;
use roommate_core::policy::{Params, Policy};
use roommate_core::profile::Profile;
use roommate_core::reason::Reason;
use roommate_core::state::Costs;
use roommate_core::time::{Span, Time};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// A job on its way to the cluster: what it asks for, and what it really needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Arrival {
    /// When it is submitted.
    pub at: Time,
    /// Its name.
    pub name: String,
    /// What it asks for; all that a policy may see.
    pub spec: Spec,
    /// Steps it really needs; a service needs none.
    pub work: f64,
    /// The requests of a service, and how long the run goes on for it at least, from its submission.
    pub requests: Option<(Requests, Span)>,
}

/// What to simulate.
pub struct Setup {
    /// The cluster.
    pub cluster: Cluster,
    /// What changes cost.
    pub costs: Costs,
    /// Name of the policy, for the journal.
    pub policy_name: String,
    /// All its parameters, for the journal.
    pub params: Params,
    /// The policy.
    pub policy: Box<dyn Policy>,
    /// What the policy knows of pairs that share a GPU, if anything.
    pub known_pairs: Option<Table>,
    /// How roommates really disturb each other.
    pub truth: Box<dyn Interference>,
    /// What goes wrong.
    pub faults: Faults,
    /// Seed of all randomness.
    pub seed: u64,
    /// Profiles, by name.
    pub profiles: Vec<(String, Profile)>,
    /// Teams.
    pub teams: Vec<String>,
    /// The jobs of interest, in order of submission: the run ends with the last of them.
    pub measure: Option<Range<u32>>,
    /// How services are measured.
    pub measuring: Measuring,
}

/// GPUs that services hold, of all: services never end, so they are a usual cause of a run
/// that does not go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// With a service.
    pub services: usize,
    /// All.
    pub gpus: usize,
}

impl std::fmt::Display for Held {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { services, gpus } = self;
        if *services == 0 {
            return Ok(());
        }
        write!(
            f,
            "; services, which never end, hold {services} of {gpus} GPUs: use a policy that lets training \
             in beside them (mudi, gpulets-like, gslice-like, muxflow-like, mps), or more GPUs"
        )
    }
}

/// Reason a simulation could not go on.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SimError {
    /// Jobs wait and nothing will ever happen.
    #[error(
        "the simulation is stuck at {at}: {waiting} jobs wait (first: {first:?}) and nothing will ever happen{held}"
    )]
    Stuck {
        /// When.
        at: Time,
        /// How many wait.
        waiting: usize,
        /// One of them.
        first: String,
        /// What services hold.
        held: Held,
    },
    /// Much happens, but no job arrives or ends any more.
    #[error(
        "the simulation goes round in circles: no job arrived or ended in {steps} steps up to {at}, {left} are left{held}"
    )]
    Circles {
        /// When it was given up.
        at: Time,
        /// Steps without a result.
        steps: usize,
        /// Jobs that have not ended.
        left: usize,
        /// What services hold.
        held: Held,
    },
    /// The next thing would happen in the far future.
    #[error(
        "the simulation would go on for more than a thousand years; {left} jobs have not ended"
    )]
    TooLong {
        /// Jobs that have not ended.
        left: usize,
    },
    /// Jobs that come in the wrong order.
    #[error("job {name:?} is submitted before the one in front of it")]
    OutOfOrder {
        /// The job.
        name: String,
    },
}

/// Steps in which no job arrives or ends after which nothing more is expected: nodes that come and go,
/// or a policy that moves jobs to and fro, could go on for ever.
const FRUITLESS_STEPS: usize = 2_000_000;

/// Runs jobs, given in order of submission, to the end; tells the observer everything.
pub fn simulate<O: Observer>(
    setup: Setup,
    jobs: impl Iterator<Item = Arrival>,
    observer: &mut O,
    progress: &mut dyn FnMut(u64),
) -> Result<Time, SimError> {
    let run = (&*setup.policy_name, setup.params);
    let head = Head::new("sim", run, setup.cluster, setup.costs, setup.seed);
    let head = Head { known_pairs: setup.known_pairs, ..head };
    observer.head(&head);
    for (i, name) in setup.teams.into_iter().enumerate() {
        observer.team(&TeamLine { idx: TeamIdx::from_usize(i), name });
    }
    let mut engine = head.engine_with(setup.policy);
    for (name, profile) in setup.profiles {
        let idx = engine.add_profile(profile.clone());
        observer.profile(&ProfileLine { idx, name, profile });
    }
    let mut world = World {
        engine,
        truth: setup.truth,
        faults: FaultSource::new(setup.faults, setup.seed),
        live: IdxVec::new(),
        running: IdxSet::default(),
        unfinished: 0,
        finished: 0,
        alarms: BinaryHeap::new(),
        facts: Vec::new(),
        acts: Vec::new(),
        dirty: Vec::new(),
        first_to_end: Vec::new(),
        out_of_memory: Vec::new(),
        counted: IdxSet::default(),
        last_name: String::new(),
        wake: None,
        measured_left: setup.measure.as_ref().map(ExactSizeIterator::len),
        measure: setup.measure,
        services: Services::new(setup.measuring, setup.seed),
        open_until: Time::ZERO,
    };
    world.run(jobs.peekable(), observer, progress)
}

/// What an alarm is about. The order is the order of facts at one instant.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Alarm {
    Finish(JobIdx, u32),
    Crash(JobIdx, u32),
    NodeDown(NodeIdx),
    NodeUp(NodeIdx),
    Ready(JobIdx, u32),
    Tuned(JobIdx, u32),
    /// A job that was held may go on.
    Unthrottle(JobIdx),
    /// The noise of its gradients is in another stage.
    Noise(JobIdx, u32),
}

/// The truth about a job.
#[derive(Clone, Debug)]
struct Live {
    meter: Meter,
    work: f64,
    gpus: GpuSet,
    /// Steps at which this attempt crashes.
    crash_at: f64,
    /// Steps at which every attempt fails, because the job is wrong.
    wrong_at: f64,
    /// When it began to make progress in its present stay, and from how many steps.
    began: Time,
    began_done: f64,
    /// Counts changes of pace; an alarm of another epoch is void.
    epoch: u32,
    /// Whether somebody else is on one of its GPUs.
    shares: bool,
    /// What it loses at the next step, where steps are charged.
    step_cost: Span,
    /// Until when the throttle of a protected roommate makes it stand still.
    held_until: Time,
    /// Whether it is a service, which never finishes.
    serves: bool,
    /// Its place among services with requests.
    slot: Option<u32>,
    /// The part of the time in which it is busy, as its roommates were last told.
    busy: f64,
    /// Its gradient noise scale, and the steps after which it is another one.
    noise_scale: f32,
    noise_until: f64,
}

impl Live {
    /// Steps after which something happens to it by itself.
    fn next_stop(&self) -> f64 {
        self.work.min(self.crash_at).min(self.noise_until)
    }
}

struct World {
    engine: Engine,
    truth: Box<dyn Interference>,
    faults: FaultSource,
    live: IdxVec<JobIdx, Live>,
    /// Jobs that make progress.
    running: IdxSet<JobIdx>,
    unfinished: usize,
    finished: u64,
    alarms: BinaryHeap<Reverse<(Time, Alarm)>>,
    facts: Vec<Event>,
    acts: Vec<Action>,
    /// Jobs whose roommates changed.
    dirty: Vec<JobIdx>,
    /// Where all are charged at every step: the running jobs that end first if nothing happens.
    first_to_end: Vec<JobIdx>,
    /// Jobs that ran out of GPU memory.
    out_of_memory: Vec<JobIdx>,
    /// Profiles whose counters were reported.
    counted: IdxSet<ProfileIdx>,
    last_name: String,
    wake: Option<Time>,
    measure: Option<Range<u32>>,
    /// How many of the jobs of interest have not ended.
    measured_left: Option<usize>,
    services: Services,
    /// The run goes on until then even without training.
    open_until: Time,
}

/// Windows of services without anything else to come after which waiting jobs are called stuck: until then
/// a policy may still make something of what it measures.
const STALL_WINDOWS: u32 = 1_000;
/// Services on one GPU feel each other; after so many looks at each they have settled well enough.
const LOOKS: usize = 4;

/// What a standing job's step is reported to take: measurements are finite.
const STANDSTILL_S: f64 = 1e12;

impl World {
    fn run<O: Observer>(
        &mut self,
        mut jobs: std::iter::Peekable<impl Iterator<Item = Arrival>>,
        observer: &mut O,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Time, SimError> {
        for node in self.engine.state().nodes.indices() {
            self.arm_node(Time::ZERO, node);
        }
        let mut now = Time::ZERO;
        let mut fruitless = 0;
        let mut steps: u64 = 0;
        let mut hope = STALL_WINDOWS;
        let goes_on = |world: &Self, now: Time| world.unfinished > 0 || now < world.open_until;
        while (goes_on(self, now) || jobs.peek().is_some()) && self.measured_left != Some(0) {
            self.drop_void_alarms();
            let end = Some(self.open_until).filter(|end| self.unfinished == 0 && *end > now);
            let alarm = self.alarms.peek().map(|a| a.0.0);
            let next = [jobs.peek().map(|j| j.at), alarm, self.wake, end].into_iter().flatten();
            let (next, served) = (next.min(), self.services.next());
            let left = self.unfinished;
            let Some(at) = next.into_iter().chain(served).min() else {
                return Err(self.stuck(now));
            };
            let is_still = next.is_none() && self.services.next_change().is_none();
            hope = if is_still { hope.saturating_sub(1) } else { STALL_WINDOWS };
            if hope == 0 {
                return Err(self.stuck(now));
            }
            if fruitless > FRUITLESS_STEPS + 100 * left {
                let held = self.held();
                return Err(SimError::Circles { at, steps: fruitless, left, held });
            } else if at > Time::LATEST {
                return Err(SimError::TooLong { left });
            }
            if at < now {
                return Err(SimError::OutOfOrder {
                    name: jobs.next().map_or(String::new(), |j| j.name),
                });
            }
            now = at;
            self.facts.clear();
            self.ring(now);
            self.ring_services(now);
            while let Some(job) = jobs.next_if(|j| j.at == now) {
                self.submit(job, observer);
            }
            // A window of which nothing is told concerns nobody.
            if next.is_none_or(|n| n > now) && self.facts.is_empty() && self.dirty.is_empty() {
                continue;
            }
            let fruit = |f: &Event| matches!(f, Event::Submitted(_) | Event::Finished(_));
            fruitless = if self.facts.iter().any(fruit) { 0 } else { fruitless + 1 };
            self.step(now, observer);
            steps += 1;
            if steps.is_multiple_of(4_096) {
                progress(self.finished);
            }
        }
        self.end_services(now, observer);
        observer.end(now);
        progress(self.finished);
        Ok(now)
    }

    fn stuck(&self, at: Time) -> SimError {
        let waiting = self.engine.state().pending.len();
        SimError::Stuck { at, waiting, first: self.last_name.clone(), held: self.held() }
    }

    fn held(&self) -> Held {
        let state = self.engine.state();
        let services = state.placed.iter().filter(|j| state.spec(*j).class == Class::Service);
        let held = services.map(|j| state.job(j).gpus.len()).sum();
        Held { services: held, gpus: state.gpus.len() }
    }

    fn is_void(&self, alarm: Alarm) -> bool {
        match alarm {
            Alarm::Finish(j, e) | Alarm::Crash(j, e) | Alarm::Ready(j, e) => {
                self.live[j].epoch != e
            }
            Alarm::Tuned(j, e) | Alarm::Noise(j, e) => self.live[j].epoch != e,
            Alarm::NodeDown(_) | Alarm::NodeUp(_) | Alarm::Unthrottle(_) => false,
        }
    }

    fn drop_void_alarms(&mut self) {
        while self.alarms.peek().is_some_and(|a| self.is_void(a.0.1)) {
            self.alarms.pop();
        }
    }

    /// Turns everything that is due into facts.
    fn ring(&mut self, now: Time) {
        while let Some(Reverse((_, alarm))) = self.alarms.peek().copied().filter(|a| a.0.0 <= now) {
            self.alarms.pop();
            if self.is_void(alarm) {
                continue;
            }
            match alarm {
                Alarm::Finish(job, _) if self.waits_for_roommates(now, job) => {}
                Alarm::Finish(job, _) => {
                    self.depart(job);
                    self.give_up(job);
                    self.finished += 1;
                    self.facts.push(Event::Finished(job));
                }
                Alarm::Crash(job, _) => {
                    let live = &self.live[job];
                    let own = live.crash_at >= live.wrong_at;
                    self.fail(now, job, if own { Reason::UserError } else { Reason::Crashed });
                }
                Alarm::NodeDown(node) => {
                    self.fail_node(now, node);
                    let back = now + self.faults.repair();
                    self.alarms.push(Reverse((back, Alarm::NodeUp(node))));
                }
                Alarm::NodeUp(node) => {
                    self.facts.push(Event::NodeUp(node));
                    self.arm_node(now, node);
                }
                Alarm::Unthrottle(job) => {
                    let gpus = self.live[job].gpus.clone();
                    self.crowd(job, &gpus);
                    self.dirty.push(job);
                }
                Alarm::Ready(job, _) => {
                    self.facts.push(Event::Started(job));
                    self.begin(now, job);
                    if self.engine.state().costs.quiet_start {
                        let gpus = self.live[job].gpus.clone();
                        self.crowd(job, &gpus);
                    }
                }
                Alarm::Tuned(job, _) => {
                    self.facts.push(Event::Tuned(job));
                    self.begin(now, job);
                    // The engine went on counting while the job stood still; it is told the truth.
                    let done = Some(self.live[job].meter.done);
                    let sample = Sample { done, ..self.sample(now, job) };
                    self.facts.push(Event::Sampled { job, sample });
                }
                Alarm::Noise(job, _) => self.next_noise(now, job),
            }
        }
    }

    fn arm_node(&mut self, now: Time, node: NodeIdx) {
        if let Some(up) = self.faults.next_failure(node) {
            self.alarms.push(Reverse((now + up, Alarm::NodeDown(node))));
        }
    }

    fn fail_node(&mut self, now: Time, node: NodeIdx) {
        let mut hit: Vec<JobIdx> = Vec::new();
        let state = self.engine.state();
        for gpu in state.node(node).gpus() {
            hit.extend_from_slice(&state.gpu(gpu).tenants);
        }
        hit.sort_unstable();
        hit.dedup();
        for job in hit {
            // A job that finished or crashed at this very instant is gone already.
            if !self.live[job].gpus.is_empty() {
                self.fail(now, job, Reason::NodeLost(node));
            }
        }
        self.facts.push(Event::NodeDown(node));
    }

    fn fail(&mut self, now: Time, job: JobIdx, reason: Reason) {
        if let Some(slot) = self.live[job].slot {
            self.services.down(now, slot);
        }
        let every = self.faults.checkpoint();
        let live = &mut self.live[job];
        let done = live.meter.done_at(now);
        let lost = match every {
            Span(0) => 0.0,
            every => Span((now - live.began).0 % every.0).secs() / live.meter.step_s,
        };
        let saved = if live.meter.step_s.is_finite() { done - lost } else { done };
        live.meter.stop_at(now, saved.clamp(live.began_done.min(done), done));
        let done = live.meter.done;
        self.depart(job);
        self.facts.push(Event::Failed { job, reason, done });
        // The engine will give the job up; the world only has to stop expecting it.
        if self.engine.state().gives_up(job, reason) {
            // What it did is told while it is still known.
            let failed = self.facts.pop();
            self.end_service(now, job);
            self.facts.extend(failed);
            self.give_up(job);
        }
    }

    /// Nothing more is expected of the job.
    fn give_up(&mut self, job: JobIdx) {
        if self.engine.state().spec(job).class == Class::Service {
            return;
        }
        self.unfinished -= 1;
        if let (Some(left), Some(range)) = (&mut self.measured_left, &self.measure) {
            *left -= usize::from(range.contains(&job.0));
        }
    }

    /// Whether a job that has done its work stays, because somebody on its GPUs has not.
    fn waits_for_roommates(&self, now: Time, job: JobIdx) -> bool {
        let state = self.engine.state();
        let is_busy = |other: &JobIdx| {
            let live = &self.live[*other];
            let left_s = live.meter.finishes(live.work).map_or(f64::INFINITY, Time::secs);
            *other != job && self.running.contains(*other) && left_s > now.secs()
        };
        let mut gpus = self.live[job].gpus.iter();
        state.costs.ends_together && gpus.any(|g| state.gpu(*g).tenants.iter().any(is_busy))
    }

    /// The job leaves its GPUs; whoever shared them will run differently.
    fn depart(&mut self, job: JobIdx) {
        let live = &mut self.live[job];
        live.epoch += 1;
        let gpus = std::mem::take(&mut live.gpus);
        self.running.remove(job);
        // Only who shared a GPU until now can run differently without the job.
        for gpu in gpus {
            let tenants = &self.engine.state().gpu(gpu).tenants;
            let shared = |t: &&JobIdx| **t != job && self.live[**t].shares;
            self.dirty.extend(tenants.iter().filter(shared));
        }
    }

    fn submit<O: Observer>(&mut self, job: Arrival, observer: &mut O) {
        let idx = self.engine.add_job(job.spec.clone());
        let serves = job.spec.class == Class::Service;
        // Drawn for all, so that the same jobs are wrong with services and without.
        let mistake = self.faults.mistake().filter(|_| !serves);
        let wrong_at = mistake.map_or(f64::INFINITY, |share| share * job.work);
        let slot = job.requests.map(|(requests, open)| {
            self.open_until = self.open_until.max(job.at + open);
            let timeout =
                self.engine.state().profile(idx).serving.map_or(Span::ZERO, |s| s.timeout);
            let slo_us = job.spec.slo.map(|s| s.p99_us);
            self.services.add(job.at, idx, requests, slo_us, timeout)
        });
        self.live.push(Live {
            meter: Meter::default(),
            work: if serves { f64::INFINITY } else { job.work },
            gpus: GpuSet::new(),
            crash_at: f64::INFINITY,
            wrong_at,
            began: job.at,
            began_done: 0.0,
            epoch: 0,
            shares: false,
            step_cost: Span::ZERO,
            held_until: Time::ZERO,
            serves,
            slot,
            busy: 0.0,
            noise_scale: 0.0,
            noise_until: f64::INFINITY,
        });
        if serves {
            if let (Some(left), Some(range)) = (&mut self.measured_left, &self.measure) {
                *left -= usize::from(range.contains(&idx.0));
            }
        } else {
            self.unfinished += 1;
        }
        self.facts.push(Event::Submitted(idx));
        let line = JobLine { idx, name: job.name, spec: job.spec };
        observer.job(&line);
        self.last_name = line.name;
    }

    /// Steps until everything that was asked is confirmed.
    fn step<O: Observer>(&mut self, now: Time, observer: &mut O) {
        loop {
            let step = self.engine.step(now, &self.facts);
            debug_assert!(step.contradictions.is_empty(), "the simulator tells the truth");
            observer.step(&StepView::of(now, &self.facts, &step));
            self.wake = step.wake;
            let asked = step.asked;
            self.acts.clear();
            self.acts.extend_from_slice(step.actions);
            let all_change = asked && self.engine.state().costs.charge.at_every_step();
            if all_change {
                self.charge_all(now);
            }
            self.facts.clear();
            for i in 0..self.acts.len() {
                self.act(now, i);
            }
            self.settle_crowded(now);
            self.fail_starved(now);
            if all_change {
                self.arm_first_to_end();
            }
            if self.facts.is_empty() {
                return;
            }
        }
    }

    /// Every running job loses of the interval since the last step what was due then.
    fn charge_all(&mut self, now: Time) {
        let mut from = 0;
        while let Some(job) = self.running.first_from(from) {
            let live = &mut self.live[job];
            live.meter.advance(now, live.step_cost);
            from = job.usize() + 1;
        }
    }

    /// Sets alarms where all jobs change at every step: only for those that end first. Notes what each
    /// will lose at the next step.
    fn arm_first_to_end(&mut self) {
        let ends = |a: Alarm| matches!(a, Alarm::Finish(..) | Alarm::Crash(..) | Alarm::Noise(..));
        self.alarms.retain(|a| !ends(a.0.1));
        self.first_to_end.clear();
        let mut first = Time(u64::MAX);
        let mut from = 0;
        while let Some(job) = self.running.first_from(from) {
            from = job.usize() + 1;
            let live = &mut self.live[job];
            live.step_cost = self.engine.state().step_cost(job);
            let ends = live.meter.finishes(live.next_stop()).unwrap_or(first);
            if ends < first {
                self.first_to_end.clear();
                first = ends;
            }
            if ends == first {
                self.first_to_end.push(job);
            }
        }
        for i in 0..self.first_to_end.len() {
            self.arm_job(self.first_to_end[i]);
        }
    }

    fn act(&mut self, now: Time, i: usize) {
        let job = self.acts[i].job();
        match &self.acts[i] {
            Action::Start(_, p) | Action::Move(_, p) => {
                let gpus = p.gpus.clone();
                let state = self.engine.state();
                let cost = match self.acts[i] {
                    Action::Move(..) => state.move_cost(job),
                    _ => state.start_cost(job),
                };
                self.halt(now, job);
                self.depart(job);
                self.move_in(now, job, gpus, cost);
            }
            Action::Stop(_) | Action::Suspend(_) => {
                self.halt(now, job);
                self.depart(job);
                let done = self.live[job].meter.done;
                self.facts.push(Event::Stopped { job, done });
            }
            Action::Tune(..) => self.tune(now, job),
            Action::Reject(..) => {
                let live = &mut self.live[job];
                live.serves = false;
                if let Some(slot) = live.slot {
                    self.services.forget(now, slot);
                }
                self.give_up(job);
            }
        }
    }

    /// The job turns its knobs; while it does, it makes no progress. One that is still starting will
    /// start with the new ones.
    fn tune(&mut self, now: Time, job: JobIdx) {
        let cost = self.engine.state().costs.tune;
        let gpus = self.live[job].gpus.clone();
        self.crowd(job, &gpus);
        if cost == Span::ZERO || !self.running.contains(job) {
            self.dirty.push(job);
            self.facts.push(Event::Tuned(job));
            self.check_memory(job);
            return;
        }
        self.halt(now, job);
        self.running.remove(job);
        let live = &mut self.live[job];
        live.epoch += 1;
        self.alarms.push(Reverse((now + cost, Alarm::Tuned(job, live.epoch))));
    }

    fn halt(&mut self, now: Time, job: JobIdx) {
        let live = &mut self.live[job];
        live.meter.stop_at(now, live.meter.done_at(now));
        if let Some(slot) = live.slot {
            self.services.down(now, slot);
        }
    }

    fn move_in(&mut self, now: Time, job: JobIdx, gpus: GpuSet, cost: Span) {
        self.crowd(job, &gpus);
        let live = &mut self.live[job];
        // A service has no work that it could crash in the middle of.
        let crash = if live.serves { None } else { self.faults.crash_point() };
        live.gpus = gpus;
        let crash_at = crash
            .map_or(f64::INFINITY, |share| live.meter.done + share * (live.work - live.meter.done));
        live.crash_at = crash_at.min(live.wrong_at);
        if cost == Span::ZERO {
            self.facts.push(Event::Started(job));
            self.begin(now, job);
        } else {
            let alarm = Alarm::Ready(job, live.epoch);
            self.alarms.push(Reverse((now + cost, alarm)));
        }
    }

    /// Everybody who shares one of these GPUs with the job will run differently.
    fn crowd(&mut self, job: JobIdx, gpus: &GpuSet) {
        for gpu in gpus {
            let tenants = &self.engine.state().gpu(*gpu).tenants;
            self.dirty.extend(tenants.iter().filter(|t| **t != job));
        }
    }

    /// From now on the job makes progress.
    fn begin(&mut self, now: Time, job: JobIdx) {
        self.hold_opportunists(now, job);
        self.set_noise(job);
        self.check_memory(job);
        let (alone, disturbed) = self.pace(now, job);
        let live = &mut self.live[job];
        live.began = now;
        live.began_done = live.meter.done;
        live.meter.set_step(now, disturbed);
        self.running.insert(job);
        self.arm_job(job);
        // The engine expects the undisturbed pace; anything else is measured and told.
        if disturbed != alone || self.training(job).is_some() {
            self.report_pace(now, job);
        }
        self.report_counters(job);
        self.serve(now, job);
    }

    /// Notes a job that runs out of GPU memory with its present knobs.
    fn check_memory(&mut self, job: JobIdx) {
        let state = self.engine.state();
        let is_there = |t: JobIdx| self.running.contains(t) && !self.out_of_memory.contains(&t);
        if self.training(job).is_some() && goodput::is_out_of_memory(state, job, &is_there) {
            self.out_of_memory.push(job);
        }
    }

    /// Jobs that ran out of memory fail.
    fn fail_starved(&mut self, now: Time) {
        while let Some(job) = self.out_of_memory.pop() {
            // One that was stopped meanwhile needs nothing.
            if !self.live[job].gpus.is_empty() {
                self.fail(now, job, Reason::OutOfMemory);
            }
        }
    }

    /// Sets the alarm for what will end this stretch of progress.
    fn arm_job(&mut self, job: JobIdx) {
        let live = &mut self.live[job];
        live.epoch += 1;
        let until = live.next_stop();
        let alarm = if until == live.work {
            Alarm::Finish
        } else if until == live.crash_at {
            Alarm::Crash
        } else {
            Alarm::Noise
        };
        if let Some(at) = live.meter.finishes(until) {
            let at = self.engine.state().costs.seen(live.began, at);
            self.alarms.push(Reverse((at, alarm(job, live.epoch))));
        }
    }
}
