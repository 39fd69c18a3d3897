//! The engine: facts in, actions out. [`Engine::step`] is a pure function of the facts so far.
//!
//! It applies facts to the state, calls the policy when a fact could change its decision, and turns
//! the difference between the plan and the state into actions.

use crate::cluster::Cluster;
use crate::event::{Action, Event, Placement, Sample};
use crate::idx::{Idx, JobIdx, NodeIdx, ProfileIdx};
use crate::interference::Interference;
use crate::interference::table::Table;
use crate::job::{Class, Job, Overrides, Phase, Retries, Spec};
use crate::math::rng::Rng;
use crate::number::Positive;
use crate::performance::pairs::{self, Extra, Pairs};
use crate::performance::progress::work_s;
use crate::performance::solo::{self, Average};
use crate::performance::usage::Usage;
use crate::plan::{Draft, News, Plan};
use crate::policy::Policy;
use crate::profile::Profile;
use crate::reason::{Note, Reason};
use crate::state::{Costs, State};
use crate::time::{Span, Time};
use std::collections::{BTreeMap, BTreeSet};

/// Totals of services are news for a policy as long as fewer facts than this wait for it.
const MOST_TOTALS: usize = 4096;

/// A policy that is asked again at one instant, because what it stopped then can be placed again,
/// is asked no more often than this.
const MOST_AGAIN: u32 = 32;

/// A job that runs beside others is measured alone after this time.
const LOOK_AFTER: Span = Span(30_000_000);

/// A fact that is impossible in the current state; it was ignored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Contradiction(pub Event);

/// The result of a step.
#[derive(Debug)]
pub struct Step<'a> {
    /// What the world has to do, in this order.
    pub actions: &'a [Action],
    /// Reasons, for `explain`.
    pub notes: &'a [Note],
    /// Facts that were ignored because they are impossible in the current state.
    pub contradictions: &'a [Contradiction],
    /// When to call [`Engine::step`] again at the latest, if no fact comes before.
    pub wake: Option<Time>,
    /// Whether the policy was called.
    pub asked: bool,
}

/// The decision core.
pub struct Engine {
    state: State,
    policy: Box<dyn Policy>,
    belief: Box<dyn Interference>,
    rng: Rng,
    draft: Draft,
    /// Jobs that wait for their retry, by when it is due.
    pauses: BTreeSet<(Time, JobIdx)>,
    /// Where jobs run already that are not submitted yet.
    found: BTreeMap<JobIdx, Placement>,
    policy_wake: Option<Time>,
    last_asked: Option<Time>,
    /// What earlier runs learned of steps of profiles that are not registered yet.
    past_steps: Vec<(ProfileIdx, u8, Average)>,
    /// How often the policy was asked at this instant.
    asked_at: (Time, u32),
    events: Vec<Event>,
    ready: Vec<JobIdx>,
    left: Vec<JobIdx>,
    actions: Vec<Action>,
    notes: Vec<Note>,
    contradictions: Vec<Contradiction>,
}

impl Engine {
    /// An engine over an empty cluster.
    pub fn new(
        cluster: &Cluster,
        costs: Costs,
        policy: Box<dyn Policy>,
        belief: Box<dyn Interference>,
        seed: u64,
    ) -> Self {
        Self {
            state: State::new(cluster, costs),
            policy,
            belief,
            rng: Rng::new(seed),
            draft: Draft::default(),
            pauses: BTreeSet::new(),
            found: BTreeMap::new(),
            policy_wake: None,
            last_asked: None,
            past_steps: Vec::new(),
            asked_at: (Time::ZERO, 0),
            events: Vec::new(),
            ready: Vec::new(),
            left: Vec::new(),
            actions: Vec::new(),
            notes: Vec::new(),
            contradictions: Vec::new(),
        }
    }

    /// The state after the last step.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Begins with what an earlier run learned, before the first step: pairs of profiles that share
    /// a GPU (as [`Pairs::iter`] tells them), lengths of steps of profiles by GPU model, and
    /// lengths of finished jobs.
    pub fn begin_with(
        &mut self,
        pairs: impl Iterator<Item = (u8, ProfileIdx, ProfileIdx, Extra)>,
        steps: impl Iterator<Item = (ProfileIdx, u8, Average)>,
        lengths: impl Iterator<Item = (f64, u32)>,
    ) {
        for (gpu_model, own, other, extra) in pairs {
            self.state.pairs.seed(gpu_model, own, other, extra);
        }
        self.past_steps.extend(steps);
        self.state.past_lengths.extend(lengths);
    }

    /// Gives the speeds of pairs in advance; what samples say counts more.
    pub fn know_pairs(&mut self, given: Option<Table>) {
        self.state.pairs = Pairs::of_table(given);
    }

    /// Registers a profile.
    pub fn add_profile(&mut self, profile: Profile) -> ProfileIdx {
        let idx = ProfileIdx::from_usize(self.state.profiles.len());
        assert!(profile.has_kind_before(idx), "the first profile of a kind is added first");
        let past = self.past_steps.iter().filter(|(of, ..)| *of == idx);
        self.state.solo.push(past.map(|(_, gpu_model, average)| (*gpu_model, *average)).collect());
        self.state.usage.push(Usage::default());
        self.state.profiles.push(profile)
    }

    /// Registers a job; policies see it once [`Event::Submitted`] arrives.
    pub fn add_job(&mut self, spec: Spec) -> JobIdx {
        assert!(self.state.profiles.has(spec.profile), "a job's profile is added first");
        assert!(spec.gpus > 0 && spec.gpus_max >= spec.gpus, "a job needs at least one GPU");
        self.state.specs.push(spec);
        self.state.jobs.push(Job::expected())
    }

    /// Registers a job that runs already, where an earlier engine placed it: once it is submitted,
    /// it is started there without asking the policy.
    pub fn add_found_job(&mut self, spec: Spec, on: Placement) -> JobIdx {
        let job = self.add_job(spec);
        self.found.insert(job, on);
        job
    }

    /// Applies facts and returns actions. Time never runs backwards.
    pub fn step(&mut self, now: Time, facts: &[Event]) -> Step<'_> {
        let rested = self.take_in(now, facts);
        let due = self.policy_wake.is_some_and(|w| w <= now);
        // The confirmation of an action of this instant does not call the policy; a later stop
        // does, because its job can be placed again from now on.
        let late = |job: JobIdx| self.state.jobs.get(job).is_some_and(|j| j.since != now);
        let again = self.policy.asks_again() && self.asked_at.1 < MOST_AGAIN;
        let matters = |e: &Event| match e {
            Event::Started(_) | Event::Tuned(_) => false,
            Event::Served { .. } | Event::Noted { .. } => false,
            // What a user sets is carried out by the world; a policy sees it in the samples.
            Event::Held { .. } | Event::Resized { .. } => false,
            Event::Stopped { job, .. } => again || late(*job),
            // A sample from the instant of the last decision is its consequence.
            Event::Sampled { .. } => self.last_asked != Some(now),
            _ => true,
        };
        let asked = due || rested || facts.iter().any(matters);
        if asked {
            self.ask();
        }
        self.answer(asked)
    }

    /// Calls the policy although nothing happened. A second call at the same instant must change
    /// nothing; the laws check this.
    pub fn look_again(&mut self) -> Step<'_> {
        self.actions.clear();
        self.notes.clear();
        self.contradictions.clear();
        self.ask();
        self.answer(true)
    }

    fn answer(&self, asked: bool) -> Step<'_> {
        let pause = self.pauses.first().map(|(at, _)| *at);
        Step {
            actions: &self.actions,
            notes: &self.notes,
            contradictions: &self.contradictions,
            wake: [self.policy_wake, pause].into_iter().flatten().min(),
            asked,
        }
    }

    /// Applies facts to the state; returns whether the retry of a job became due.
    fn take_in(&mut self, now: Time, facts: &[Event]) -> bool {
        assert!(now >= self.state.now, "time runs forward");
        self.actions.clear();
        self.notes.clear();
        self.contradictions.clear();
        self.state.now = now;
        if self.asked_at.0 != now {
            self.asked_at = (now, 0);
        }
        let mut rested = false;
        while let Some(&(at, job)) = self.pauses.first().filter(|(at, _)| *at <= now) {
            self.pauses.remove(&(at, job));
            self.make_ready(job);
            rested = true;
        }
        for fact in facts {
            if self.apply(fact).is_none() {
                self.contradictions.push(Contradiction(*fact));
            } else if self.is_news(fact) {
                self.events.push(*fact);
            }
        }
        rested
    }

    /// Whether a policy sees the fact when it is asked next. Totals of services ask nobody, so that
    /// many could gather until then.
    fn is_news(&self, fact: &Event) -> bool {
        match fact {
            Event::Noted { .. } => false,
            Event::Served { .. } => self.events.len() < MOST_TOTALS,
            _ => true,
        }
    }

    fn ask(&mut self) {
        let charged = self.state.costs.quirks.charge.at_every_step();
        if charged {
            self.charge_all();
        }
        let news = News { events: &self.events, ready: &self.ready, left: &self.left };
        let mut plan =
            Plan::new(&mut self.state, &mut self.draft, news, &*self.belief, &mut self.rng);
        self.policy.schedule(&mut plan);
        self.draft.commit(&mut self.state, &mut self.actions, &mut self.notes);
        if charged {
            self.set_step_costs();
        }
        self.policy_wake = self.draft.wake();
        self.last_asked = Some(self.state.now);
        self.asked_at = (self.state.now, self.asked_at.1 + 1);
        self.events.clear();
        self.ready.clear();
        self.left.clear();
    }

    /// Charges every running job, for the interval since the last step, the cost that was due then.
    fn charge_all(&mut self) {
        let State { placed, jobs, now, .. } = &mut self.state;
        for job in placed.iter() {
            let cost = jobs[job].step_cost;
            jobs[job].meter.advance(*now, cost);
        }
    }

    /// The cost of the next step depends on the roommates that each running job has now.
    fn set_step_costs(&mut self) {
        let mut last = None;
        while let Some(job) = self.state.placed.next_after(last) {
            self.state.jobs[job].step_cost = self.state.step_cost(job);
            last = Some(job);
        }
    }

    /// Applies a fact; `None` if it is impossible in the current state.
    fn apply(&mut self, fact: &Event) -> Option<()> {
        match *fact {
            Event::Submitted(job) => self.submitted(job),
            Event::Started(job) => self.started(job),
            Event::Stopped { job, done } => self.stopped(job, done.get()),
            Event::Tuned(job) => self.state.jobs.get(job)?.is_placed().then_some(()),
            Event::Finished(job) => self.ended(job, None),
            Event::Cancelled(job) => self.ended(job, Some(Reason::Cancelled)),
            Event::Withdrawn(job) => self.withdrawn(job),
            Event::Failed { job, reason, done } => self.failed(job, reason, done.get()),
            Event::Sampled { job, sample } => self.sampled(job, &sample),
            // Requests arrive whether or not the service is running.
            Event::Served { job, .. } => {
                let phase = self.hot(job)?.phase;
                (!matches!(phase, Phase::Expected | Phase::Done)).then_some(())
            }
            Event::Noted { job, reason } => {
                let hot = self.hot(job).filter(|j| j.is_placed())?;
                hot.last_reason = Some(reason);
                Some(())
            }
            Event::Held { job, held } => self.set_by_user(job, |user| user.held = held),
            Event::Resized { job, batch, share_permille } => self.set_by_user(job, |user| {
                user.batch = batch.unwrap_or(user.batch);
                user.share_permille = share_permille.unwrap_or(user.share_permille);
            }),
            Event::NodeUp(node) => self.node_up(node),
            Event::NodeDown(node) => self.node_down(node),
            Event::NodeRoom { node, cpu_milli, host_mib } => {
                self.state.nodes.get(node)?;
                self.state.set_room(node, cpu_milli, host_mib);
                Some(())
            }
        }
    }

    fn hot(&mut self, job: JobIdx) -> Option<&mut Job> {
        self.state.jobs.get_mut(job)
    }

    fn submitted(&mut self, job: JobIdx) -> Option<()> {
        let now = self.state.now;
        let hot = self.hot(job).filter(|j| j.phase == Phase::Expected)?;
        if !hot.was_submitted {
            hot.submitted = now;
        }
        hot.was_submitted = true;
        hot.since = now;
        hot.meter.since = now;
        if let Some(on) = self.found.remove(&job)
            && self.state.check(job, &on.gpus, on.knobs).is_ok()
        {
            self.state.occupy(job, &on.gpus, on.knobs);
            let hot = &mut self.state.jobs[job];
            (hot.phase, hot.starts) = (Phase::Starting, 1);
            self.actions.push(Action::Start(job, on));
            return Some(());
        }
        // A job that can never run would block all jobs behind it in a strict queue.
        let (need, exist) = (self.state.spec(job).gpus, self.state.usable_by(job));
        if u32::from(need) > exist {
            let reason = Reason::TooLarge { need, exist };
            self.state.jobs[job].phase = Phase::Done;
            self.actions.push(Action::Reject(job, reason));
        } else {
            self.make_ready(job);
        }
        Some(())
    }

    fn started(&mut self, job: JobIdx) -> Option<()> {
        let now = self.state.now;
        self.hot(job).filter(|j| j.phase == Phase::Starting)?.phase = Phase::Running;
        let step_s = self.state.alone_step_s(job, &self.state.job(job).gpus);
        let step_s = work_s(step_s, self.state.goodput_factor(job, 0));
        self.hot(job)?.parked_on.clear();
        self.hot(job)?.meter.set_step(now, step_s);
        Some(())
    }

    fn stopped(&mut self, job: JobIdx, done: f64) -> Option<()> {
        let now = self.state.now;
        let hot = self.hot(job).filter(|j| j.phase == Phase::Stopping)?;
        hot.meter.stop_at(now, done);
        self.make_ready(job);
        Some(())
    }

    fn ended(&mut self, job: JobIdx, cancelled: Option<Reason>) -> Option<()> {
        let phase = self.hot(job)?.phase;
        let known = match cancelled {
            // A job that waits may have finished while it was being stopped.
            None => !matches!(phase, Phase::Expected | Phase::BackingOff | Phase::Done),
            Some(_) => !matches!(phase, Phase::Expected | Phase::Done),
        };
        if !known {
            return None;
        }
        self.leave(job);
        let hot = self.hot(job)?;
        hot.done_before_end = hot.meter.done;
        if let Some(work) = self.state.spec(job).work {
            // Believed progress continues until the end is reported, and may exceed the real
            // progress.
            let done = &mut self.hot(job)?.meter.done;
            *done = if cancelled.is_none() { work.get() } else { done.min(work.get()) };
        }
        self.pauses.retain(|(_, j)| *j != job);
        self.hot(job)?.phase = Phase::Done;
        Some(())
    }

    fn withdrawn(&mut self, job: JobIdx) -> Option<()> {
        self.hot(job).filter(|j| !matches!(j.phase, Phase::Expected | Phase::Done))?;
        self.leave(job);
        self.pauses.retain(|(_, j)| *j != job);
        self.hot(job)?.phase = Phase::Expected;
        Some(())
    }

    fn failed(&mut self, job: JobIdx, reason: Reason, done: f64) -> Option<()> {
        let now = self.state.now;
        let backoff = self.state.costs.backoff;
        let phase = self.hot(job)?.phase;
        if !matches!(phase, Phase::Starting | Phase::Running | Phase::Stopping) {
            return None;
        }
        let exhausted = self.state.gives_up(job, reason);
        let hot = self.hot(job)?;
        let own_fault = Retries::counts(reason);
        hot.failures = hot.failures.saturating_add(u16::from(own_fault));
        let failures = hot.failures;
        self.leave(job);
        let hot = self.hot(job)?;
        hot.meter.stop_at(now, done);
        if exhausted {
            hot.phase = Phase::Done;
            self.notes.push(Note { job, reason: Reason::OutOfRetries });
        } else if own_fault && backoff > Span::ZERO {
            let pause = Span(backoff.0.saturating_mul(1 << u32::from(failures - 1).min(10)));
            hot.phase = Phase::BackingOff;
            self.pauses.insert((now + pause, job));
            self.notes.push(Note { job, reason: Reason::BacksOff(pause) });
        } else {
            self.make_ready(job);
        }
        Some(())
    }

    fn sampled(&mut self, job: JobIdx, sample: &Sample) -> Option<()> {
        let now = self.state.now;
        let hot = self.hot(job).filter(|j| j.phase == Phase::Running)?;
        if let Some(done) = sample.done {
            hot.meter.done = done.get();
            hot.meter.since = now;
        }
        if sample.noise_scale > 0.0 {
            hot.noise_scale = sample.noise_scale.get();
        }
        if sample.step_s > 0.0 && !sample.alone {
            let worth = self.state.goodput_factor(job, sample.batch);
            // Progress is a quotient by the length of a step.
            let step_s = Positive::of(sample.step_s.get()).get();
            self.hot(job)?.meter.set_step(now, work_s(step_s, worth));
        }
        self.learn(job, sample);
        Some(())
    }

    /// Whether the policy wants to know how fast a running job is alone, and nobody does because it
    /// has roommates. At once where somebody there was promised a speed; else only once the job has
    /// run for a while, because what is learned of jobs that soon end is worth less than it costs.
    /// Beside a service nobody is measured.
    pub fn wants_speed_alone(&self, job: JobIdx) -> bool {
        let (state, hot) = (&self.state, self.state.job(job));
        let wants = self.policy.wants_speeds_alone()
            && hot.phase == Phase::Running
            && state.profile(job).step_unknown
            && !state.is_alone(job)
            && !state.belief_on(job, &hot.gpus).is_measured;
        if !wants {
            return false;
        }
        let mut urgent = state.now - hot.since >= LOOK_AFTER;
        for tenant in hot.gpus.iter().flat_map(|g| &state.gpu(*g).tenants) {
            let spec = state.spec(*tenant);
            if spec.class == Class::Service {
                return false;
            }
            urgent |= spec.max_slowdown.is_some();
        }
        urgent
    }

    /// What a sample says of the job's profile, and of those of its roommates.
    fn learn(&mut self, job: JobIdx, sample: &Sample) {
        let alone = sample.alone || self.state.is_alone(job);
        let profile = self.state.spec(job).profile;
        let kind = self.state.kind(profile);
        let was_known = self.state.demand(profile).is_some();
        self.state.usage[kind].learn(sample, alone);
        if !was_known && self.state.demand(profile).is_some() {
            self.state.pairs.touch();
        }
        if sample.step_s > 0.0 {
            solo::learn(&mut self.state, job, sample);
        }
        if !alone && sample.step_s > 0.0 {
            pairs::learn(&mut self.state, job, sample);
        }
    }

    /// Jobs that are carried into a new journal are set before they are submitted there.
    fn set_by_user(&mut self, job: JobIdx, set: impl FnOnce(&mut Overrides)) -> Option<()> {
        let hot = self.hot(job).filter(|j| j.phase != Phase::Done)?;
        set(&mut hot.user);
        Some(())
    }

    fn node_up(&mut self, node: NodeIdx) -> Option<()> {
        self.state.nodes.get(node).filter(|n| !n.up)?;
        self.state.set_up(node, true);
        Some(())
    }

    /// Jobs that are still on the node lose their GPUs even if their failure was not reported.
    fn node_down(&mut self, node: NodeIdx) -> Option<()> {
        self.state.nodes.get(node).filter(|n| n.up)?;
        for gpu in self.state.node(node).gpus() {
            while let Some(&job) = self.state.gpu(gpu).tenants.first() {
                let done = self.state.done(job);
                self.failed(job, Reason::NodeLost(node), done);
            }
        }
        self.forget_parked(node);
        self.state.set_up(node, false);
        Some(())
    }

    /// A job suspended in the memory of a lost node has to start anew.
    fn forget_parked(&mut self, node: NodeIdx) {
        let State { jobs, gpus, pending, .. } = &mut self.state;
        for job in pending.iter() {
            let parked_on = &mut jobs[job].parked_on;
            if parked_on.iter().any(|g| gpus[*g].node == node) {
                parked_on.clear();
            }
        }
    }

    /// Takes a job off its GPUs or out of the queue, permanently or until it is pending again.
    fn leave(&mut self, job: JobIdx) {
        let now = self.state.now;
        let hot = &mut self.state.jobs[job];
        hot.attained_gpu_us = hot.attained_gpu_us.saturating_add(hot.service(now - hot.since));
        hot.since = now;
        hot.meter.stop_at(now, hot.meter.done_at(now).max(hot.meter.done));
        hot.parked_on.clear();
        self.state.vacate(job);
        self.state.pending.remove(job);
        self.left.push(job);
    }

    fn make_ready(&mut self, job: JobIdx) {
        self.state.jobs[job].phase = Phase::Pending;
        self.state.pending.insert(job);
        self.ready.push(job);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interference::Undisturbed;
    use crate::number::Number;
    use crate::policy;

    fn fifo(cluster: &str) -> Engine {
        let fifo = policy::find("fifo").unwrap().build(&policy::Params::new()).unwrap();
        let cluster = cluster.parse().unwrap();
        let mut engine = Engine::new(&cluster, Costs::default(), fifo, Box::new(Undisturbed), 0);
        engine.add_profile(Profile::of_step(1.0));
        engine
    }

    fn on(gpus: &[u32]) -> Placement {
        let gpus = gpus.iter().map(|g| crate::idx::GpuIdx(*g)).collect();
        Placement { gpus, knobs: crate::knobs::Knobs::WHOLE }
    }

    #[test]
    fn a_job_that_runs_already_is_started_where_it_is() {
        let mut engine = fifo("1x2");
        let spec = Spec::training(1, 10.0, ProfileIdx(0));
        let found = engine.add_found_job(spec.clone(), on(&[1]));
        // The same GPU cannot be held whole by another; that job waits as any does.
        let torn = engine.add_found_job(spec, on(&[1]));
        let step = engine.step(Time::ZERO, &[Event::Submitted(found), Event::Submitted(torn)]);
        let starts = [Action::Start(found, on(&[1])), Action::Start(torn, on(&[0]))];
        assert_eq!(step.actions, starts);
        engine.step(Time::ZERO, &[Event::Started(found), Event::Started(torn)]);
        assert_eq!(engine.state().job(found).phase, Phase::Running);
    }

    #[test]
    fn a_withdrawn_job_keeps_what_it_attained() {
        let mut engine = fifo("1x1");
        let job = engine.add_job(Spec::training(1, 100.0, ProfileIdx(0)));
        engine.step(Time::ZERO, &[Event::Submitted(job)]);
        engine.step(Time::ZERO, &[Event::Started(job)]);
        let ten = Time::from_secs(10.0);
        let step = engine.step(ten, &[Event::Withdrawn(job)]);
        assert!(step.contradictions.is_empty());
        assert_eq!(
            (engine.state().idle_gpus(), engine.state().job(job).phase),
            (1, Phase::Expected)
        );
        // It is known, but nothing may be done with it until it is back.
        assert!(engine.step(ten, &[Event::Started(job)]).contradictions.len() == 1);
        let step = engine.step(Time::from_secs(20.0), &[Event::Submitted(job)]);
        assert_eq!(step.actions, [Action::Start(job, on(&[0]))]);
        assert_eq!(engine.state().job(job).submitted, Time::ZERO);
        assert_eq!(engine.state().attained(job), 10_000_000);
    }

    #[test]
    fn the_gpus_of_a_task_are_on_one_node() {
        let mut engine = fifo("2x3");
        let spec = Spec { gpus_per_task: 2, ..Spec::training(4, 10.0, ProfileIdx(0)) };
        assert_eq!(spec.check(), Ok(()));
        assert!(Spec { gpus_per_task: 3, ..spec.clone() }.check().is_err());
        let job = engine.add_job(spec);
        let torn = Err(crate::state::Infeasible::Torn);
        let whole = crate::knobs::Knobs::WHOLE;
        assert_eq!(engine.state().check(job, &on(&[0, 1, 2, 3]).gpus, whole), torn);
        assert_eq!(engine.state().check(job, &on(&[0, 1, 3, 4]).gpus, whole), Ok(()));
    }

    #[test]
    fn others_may_use_a_part_of_a_node() {
        let mut engine = fifo("1x2:8c");
        let knobs = crate::knobs::Knobs { cpu_milli: 4000, ..crate::knobs::Knobs::WHOLE };
        let spec = Spec { knobs, ..Spec::training(1, 10.0, ProfileIdx(0)) };
        let jobs = [engine.add_job(spec.clone()), engine.add_job(spec)];
        let room = |cpu_milli| Event::NodeRoom { node: NodeIdx(0), cpu_milli, host_mib: 1 };
        let facts = [room(6000), Event::Submitted(jobs[0]), Event::Submitted(jobs[1])];
        assert_eq!(engine.step(Time::ZERO, &facts).actions.len(), 1);
        assert_eq!(engine.step(Time::ZERO, &[room(8000)]).actions.len(), 1);
    }

    #[test]
    fn a_job_that_ended_has_done_its_work_and_no_more() {
        for (end, done) in [(Event::Finished(JobIdx(0)), 10.0), (Event::Cancelled(JobIdx(0)), 10.0)]
        {
            let fifo = policy::find("fifo").unwrap().build(&policy::Params::new()).unwrap();
            let cluster = "1x1".parse().unwrap();
            let mut engine =
                Engine::new(&cluster, Costs::default(), fifo, Box::new(Undisturbed), 0);
            let profile = engine.add_profile(Profile::of_step(1.0));
            let job = engine.add_job(Spec::training(1, 10.0, profile));
            engine.step(Time::ZERO, &[Event::Submitted(job)]);
            let sample = Sample { step_s: Number::of(1.0), ..Sample::default() };
            engine.step(Time::ZERO, &[Event::Started(job), Event::Sampled { job, sample }]);
            // The end of the job is reported late.
            engine.step(Time::from_secs(60.0), &[end]);
            assert_eq!(engine.state().done(job), done);
        }
    }
}
