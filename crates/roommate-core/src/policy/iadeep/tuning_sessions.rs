//! Tuning of devices: which GPUs are searched, what is applied to whom, and whether it really was.
//!
//! A GPU whose tenants changed is searched by a [`Tuner`] over the batch sizes of all of them, from what they run with
//! now, and takes nobody meanwhile. What tenants are told counts once a sample says it.

use crate::event::Sample;
use crate::idx::{GpuIdx, Idx, IdxSet, JobIdx, ProfileIdx};
use crate::interference::degradation::DegradationModel;
use crate::job::Phase;
use crate::knobs::Knobs;
use crate::performance::goodput::{self, MemoryFit, Training};
use crate::plan::Plan;
use crate::policy::iadeep::batch_search::{Axis, Batches, Options, Tuner, Turn};
use crate::reason::Reason;
use crate::time::{Span, Time};
use smallvec::SmallVec;
use std::collections::BTreeMap;

/// Jobs on a GPU.
type Tenants = SmallVec<[JobIdx; 4]>;

/// A device that is being tuned.
#[derive(Clone, Debug)]
struct Session {
    tuner: Tuner,
    /// Who is tuned, in the order of the tuner's axes.
    jobs: Tenants,
    /// What they were last told.
    asked: Batches,
    began: Time,
    /// When the measurement is due.
    due: Time,
    /// How often it was put off.
    delays: u8,
    /// Whether the search is over, and only its result has to be seen at work.
    settled: bool,
}

/// What was last measured of a job.
#[derive(Clone, Copy, Debug, Default)]
struct Last {
    step_s: f64,
    batch: u32,
    /// Whether that was since it was last told a batch size.
    fresh: bool,
    /// Its noise scale when the last search of its device began, and at its end; 0 = never.
    tuned_noise: f32,
}

/// What is known of a kind of training.
#[derive(Clone, Debug)]
struct Kind {
    memory: MemoryFit,
    /// The largest batch that is tried: smaller than any that ran out of memory.
    cap: u32,
}

/// The best batches that a group of kinds ended with, and all that was measured, in the order of the kinds.
#[derive(Clone, Debug, Default)]
struct Archived {
    trials: Vec<(Batches, f64)>,
    /// The best, relative to the users' own.
    times: SmallVec<[f64; 4]>,
}

/// A measurement that does not come is waited for so often.
const DELAYS: u8 = 3;
/// How far what the same kinds measured before is trusted: noise scales move.
const DOUBT: f64 = 0.3;
/// How different kinds may be whose best batches are worth a try.
const SIMILAR: f64 = 0.3;
/// Who was searched for so long is left alone for so many times as long, however its noise scale moves: with few samples it
/// is a noisy figure itself, and a search tries batches that are bad.
const REST: f64 = 10.0;
/// Measurements of a group that are kept.
const KEPT: usize = 24;

/// Which devices are searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// None: batch sizes stay as they are.
    Off,
    /// Devices with more than one tenant.
    Shared,
    /// Also devices with one tenant.
    All,
}

/// All devices.
#[derive(Clone, Debug)]
pub(crate) struct Tuning {
    options: Options,
    window: Span,
    drift: f64,
    scope: Scope,
    sessions: BTreeMap<GpuIdx, Session>,
    /// Devices whose tenants changed and that are not tuned yet, with the instant of the next look.
    pending: BTreeMap<GpuIdx, Time>,
    /// Until when a noise scale that moved is no reason to search a device again.
    resting: BTreeMap<GpuIdx, Time>,
    last: Vec<Last>,
    kinds: Vec<Kind>,
    /// Jobs that do not do what they are told.
    unresponsive: IdxSet<JobIdx>,
    archive: BTreeMap<SmallVec<[ProfileIdx; 4]>, Archived>,
}

impl Tuning {
    /// Searches the devices of a `scope` with these options, with measurements that take a `window`,
    /// and anew when a noise scale moved by the factor `drift`.
    pub(crate) fn new(options: Options, window: Span, drift: f64, scope: Scope) -> Self {
        Self {
            options,
            window,
            drift,
            scope,
            sessions: BTreeMap::new(),
            pending: BTreeMap::new(),
            resting: BTreeMap::new(),
            last: Vec::new(),
            kinds: Vec::new(),
            unresponsive: IdxSet::default(),
            archive: BTreeMap::new(),
        }
    }

    /// Makes room for all jobs and kinds that are known.
    pub(crate) fn resize(&mut self, plan: &Plan<'_>) {
        self.last.resize(plan.jobs.len(), Last::default());
        let new = Kind { memory: MemoryFit::default(), cap: u32::MAX };
        self.kinds.resize(plan.profiles.len(), new);
    }

    /// Whether the device takes nobody now.
    pub(crate) fn is_busy(&self, gpu: GpuIdx) -> bool {
        self.sessions.contains_key(&gpu) || self.pending.contains_key(&gpu)
    }

    /// The device has other tenants than before; whatever was searched there is void.
    pub(crate) fn unsettle(&mut self, gpu: GpuIdx) {
        self.sessions.remove(&gpu);
        self.search_soon(gpu);
    }

    /// The only way into a search; closed where nothing is to be tuned.
    fn search_soon(&mut self, gpu: GpuIdx) {
        if self.scope != Scope::Off {
            self.pending.insert(gpu, Time::ZERO);
        }
    }

    /// Takes in what was measured of a running job.
    pub(crate) fn sampled(&mut self, plan: &mut Plan<'_>, job: JobIdx, sample: &Sample) {
        let last = &mut self.last[job.usize()];
        if sample.step_s > 0.0 {
            last.step_s = sample.step_s;
            last.batch = sample.batch;
            last.fresh = true;
        }
        if sample.batch > 0 && sample.mem_mib > 0 {
            let profile = plan.spec(job).profile;
            self.kinds[profile.usize()].memory.observe(sample.batch, sample.mem_mib);
        }
        let (was, is) = (last.tuned_noise, sample.noise_scale);
        let [gpu] = plan.job(job).gpus[..] else { return };
        if self.scope == Scope::Off || is <= 0.0 || self.is_busy(gpu) {
            return;
        }
        let ratio = f64::from(is) / f64::from(was);
        let rests = self.resting.get(&gpu).is_some_and(|until| plan.now < *until);
        if was > 0.0 && !rests && (ratio >= self.drift || ratio <= 1.0 / self.drift) {
            let whole = |v: f32| v.round() as u32;
            plan.note(job, Reason::NoiseDrifted { from: whole(was), to: whole(is) });
            self.search_soon(gpu);
        }
        // A job that took its time to start or to be measured: its roommates were tuned without it, or nobody was.
        let searched = plan.gpu(gpu).tenants.len() > 1 || self.scope == Scope::All;
        if was == 0.0 && searched && self.axis(plan, job).is_some() {
            self.search_soon(gpu);
        }
    }

    /// A job failed with the batch size that it had: nobody of its kind is sent there again.
    pub(crate) fn ran_out_of_memory(&mut self, plan: &Plan<'_>, job: JobIdx) {
        // The state has forgotten its knobs only when it starts again.
        let batch = plan.job(job).knobs.batch;
        let own = plan.profile(job).training.as_ref().map_or(0, |t| t.batch);
        if batch > own {
            let cap = &mut self.kinds[plan.spec(job).profile.usize()].cap;
            *cap = (*cap).min(batch - 1).max(own);
        }
    }

    /// A job lost its GPUs; whoever was with it is tuned anew.
    pub(crate) fn left(&mut self, job: JobIdx) {
        self.last[job.usize()] = Last::default();
        self.unresponsive.remove(job);
        let with: Vec<GpuIdx> =
            self.sessions.iter().filter(|(_, s)| s.jobs.contains(&job)).map(|(g, _)| *g).collect();
        with.into_iter().for_each(|gpu| self.unsettle(gpu));
    }

    /// Degradation of a job by its last sample.
    pub(crate) fn degradation(&self, plan: &Plan<'_>, job: JobIdx) -> Option<f64> {
        let Last { step_s, batch, .. } = self.last[job.usize()];
        let hot = plan.job(job);
        if step_s <= 0.0 || hot.phase != Phase::Running {
            return None;
        }
        let alone_s = plan.alone_step_s(job, &hot.gpus);
        let pd = match &plan.profile(job).training {
            Some(t) if batch > 0 && batch != t.batch => {
                let [m0, m] = [t.batch, batch].map(f64::from);
                goodput::degradation(alone_s, step_s, m0, m, f64::from(hot.noise_scale))
            }
            _ => step_s / alone_s,
        };
        (pd.is_finite() && pd > 0.0).then_some(pd)
    }

    /// What a job may have for a batch size, if it can be tuned at all now.
    fn axis(&self, plan: &Plan<'_>, job: JobIdx) -> Option<(Axis, u32)> {
        let training = plan.profile(job).training.as_ref()?;
        let hot = plan.job(job);
        let now = training.batch_of(hot.knobs);
        let cap = self.kinds[plan.spec(job).profile.usize()].cap;
        let axis = Axis { low: training.batch_min, high: training.batch_max.min(cap).max(now) };
        let tunable = hot.noise_scale > 0.0
            && training.is_sane()
            && axis.low < axis.high
            && axis.low <= now
            && hot.gpus.len() == 1
            && !self.unresponsive.contains(job);
        tunable.then_some((axis, now))
    }
}

/// The memory limit of a job at a batch size, as far as that is known: what will hardly be exceeded.
fn limit_mib(plan: &Plan<'_>, kinds: &[Kind], job: JobIdx, training: &Training, batch: u32) -> u32 {
    let (spec, knobs) = (plan.spec(job), plan.job(job).knobs);
    if knobs.mem_mib == 0 {
        return 0;
    }
    let known = &kinds[spec.profile.usize()].memory;
    let upper = if known.is_known() {
        known.upper_mib(batch)
    } else {
        // Nothing was measured; what it has now is for what it runs with now.
        let mut booked = MemoryFit::default();
        booked.observe(training.batch_of(knobs), knobs.mem_mib);
        booked.upper_mib(batch)
    };
    let upper = upper.unwrap_or(knobs.mem_mib).max(1);
    // With its own batch it keeps what its user asked for: less would be on the host.
    if batch == training.batch { upper.max(spec.knobs.mem_mib) } else { upper }
}

fn capacity_mib(plan: &Plan<'_>, gpu: GpuIdx) -> u32 {
    plan.gpu_models[usize::from(plan.gpu(gpu).gpu_model)].mem_mib
}

/// Memory that a tenant can be brought back to: what it asked for, at its own batch size.
fn least_mib(plan: &Plan<'_>, job: JobIdx) -> u32 {
    plan.job(job).knobs.mem_mib.min(plan.spec(job).knobs.mem_mib)
}

/// Whether there would be memory for the job if everybody had what they asked for.
pub(crate) fn could_hold(plan: &Plan<'_>, job: JobIdx, gpu: GpuIdx) -> bool {
    let all = u64::from(capacity_mib(plan, gpu));
    let tenants = plan.gpu(gpu).tenants.iter().map(|t| u64::from(least_mib(plan, *t)));
    all == 0 || tenants.sum::<u64>() + u64::from(plan.spec(job).knobs.mem_mib) <= all
}

/// Brings tenants back to their own batch sizes, those that grew most first, until the job has room.
pub(crate) fn make_room(plan: &mut Plan<'_>, job: JobIdx, gpu: GpuIdx) {
    let all = u64::from(capacity_mib(plan, gpu));
    let asked = u64::from(plan.spec(job).knobs.mem_mib);
    let mut tenants = plan.gpu(gpu).tenants.clone();
    let grown = |plan: &Plan<'_>, t: JobIdx| plan.job(t).knobs.mem_mib - least_mib(plan, t);
    tenants.sort_by_key(|t| (std::cmp::Reverse(grown(plan, *t)), *t));
    for tenant in tenants {
        let used = u64::from(plan.gpu(gpu).mem_used_mib);
        if all == 0 || used + asked <= all || grown(plan, tenant) == 0 {
            return;
        }
        let own = plan.spec(tenant).knobs;
        let knobs = Knobs { batch: own.batch, ..plan.job(tenant).knobs };
        let _ = plan.tune(tenant, Knobs { mem_mib: own.mem_mib, ..knobs });
    }
}

// Searches.
impl Tuning {
    /// Goes on with the searches whose measurements are due.
    pub(crate) fn advance(&mut self, plan: &mut Plan<'_>, predictor: &mut DegradationModel) {
        let due = self.sessions.iter().filter(|(_, s)| s.due <= plan.now);
        let due: Vec<GpuIdx> = due.map(|(g, _)| *g).collect();
        for gpu in due {
            let Some(session) = self.sessions.remove(&gpu) else { continue };
            let there = |j: &JobIdx| plan.gpu(gpu).tenants.contains(j);
            if session.jobs.iter().all(there) {
                self.go_on(plan, gpu, session, predictor);
            } else {
                self.unsettle(gpu);
            }
        }
    }

    fn go_on(
        &mut self,
        plan: &mut Plan<'_>,
        gpu: GpuIdx,
        mut session: Session,
        predictor: &mut DegradationModel,
    ) {
        let Some(measured) = self.measured(plan, gpu, &session) else {
            session.delays += 1;
            if session.delays <= DELAYS {
                session.due = plan.now + self.window;
                self.sessions.insert(gpu, session);
            } else {
                self.give_up_unresponsive(plan, gpu, &session);
            }
            return;
        };
        session.delays = 0;
        if session.settled {
            self.end(plan, gpu, &session, &measured, predictor);
            return;
        }
        let mean = measured.iter().map(|(_, pd)| pd).sum::<f64>() / measured.len() as f64;
        session.tuner.observe(&session.asked, mean);
        self.archive(plan, &session, mean);
        let turn = session.tuner.next(&|batches| self.fits(plan, gpu, &session.jobs, batches));
        let (batches, settled) = match turn {
            Turn::Measure(batches) => (batches, false),
            Turn::Settle(batches) => (batches, true),
        };
        if batches == session.asked && settled {
            self.end(plan, gpu, &session, &measured, predictor);
            return;
        }
        // Where there is no room after all, what runs now is the result.
        let applied = self.apply(plan, &session.jobs, &batches);
        session.settled = settled || !applied;
        if applied {
            session.asked = batches;
        }
        session.due = plan.now + self.window;
        self.sessions.insert(gpu, session);
    }

    /// Degradations of all tenants, if everybody who was told something does it and was measured since.
    fn measured(
        &self,
        plan: &Plan<'_>,
        gpu: GpuIdx,
        session: &Session,
    ) -> Option<Vec<(JobIdx, f64)>> {
        for (job, asked) in session.jobs.iter().zip(&session.asked) {
            let Last { batch, fresh, .. } = self.last[job.usize()];
            if !fresh || batch != *asked {
                return None;
            }
        }
        let tenants = plan.gpu(gpu).tenants.iter();
        tenants
            .map(|j| Some((*j, self.degradation(plan, *j).or_else(|| quiet(plan, *j))?)))
            .collect()
    }

    /// Who still runs with another batch size than it was told is left alone; the others are tuned anew.
    fn give_up_unresponsive(&mut self, plan: &mut Plan<'_>, gpu: GpuIdx, session: &Session) {
        for (job, asked) in session.jobs.iter().zip(&session.asked) {
            let Last { batch, fresh, .. } = self.last[job.usize()];
            if !fresh || batch != *asked {
                self.unresponsive.insert(*job);
                plan.note(*job, Reason::BatchNotApplied { batch: *asked });
            }
        }
        self.search_soon(gpu);
    }

    /// Whether batch sizes fit for certain, with what everybody else has.
    fn fits(&self, plan: &Plan<'_>, gpu: GpuIdx, jobs: &[JobIdx], batches: &[u32]) -> bool {
        let all = u64::from(capacity_mib(plan, gpu));
        if all == 0 {
            return true;
        }
        let takes = |job: &JobIdx| {
            let hot = u64::from(plan.job(*job).knobs.mem_mib);
            let at = jobs.iter().position(|j| j == job);
            match (at, &plan.profile(*job).training) {
                (Some(i), Some(t)) => u64::from(limit_mib(plan, &self.kinds, *job, t, batches[i])),
                _ => hot,
            }
        };
        plan.gpu(gpu).tenants.iter().map(takes).sum::<u64>() <= all
    }

    /// Tells everybody its batch size, those who give memory back first. Whoever changes has to be measured again.
    fn apply(&mut self, plan: &mut Plan<'_>, jobs: &[JobIdx], batches: &[u32]) -> bool {
        let mut turns: SmallVec<[(i64, JobIdx, Knobs); 4]> = SmallVec::new();
        for (job, batch) in jobs.iter().zip(batches) {
            let Some(training) = &plan.profile(*job).training else { continue };
            let now = plan.job(*job).knobs;
            if training.batch_of(now) == *batch {
                continue;
            }
            let mem_mib = limit_mib(plan, &self.kinds, *job, training, *batch);
            let knobs = Knobs { mem_mib, batch: *batch, ..now };
            turns.push((i64::from(mem_mib) - i64::from(now.mem_mib), *job, knobs));
        }
        turns.sort_by_key(|(more, job, _)| (*more, *job));
        let mark = plan.mark();
        for (_, job, knobs) in &turns {
            if plan.tune(*job, *knobs).is_err() {
                plan.undo_to(mark);
                return false;
            }
        }
        for (_, job, _) in turns {
            self.last[job.usize()].fresh = false;
        }
        true
    }

    /// The result of a search was seen at work.
    fn end(
        &mut self,
        plan: &mut Plan<'_>,
        gpu: GpuIdx,
        session: &Session,
        measured: &[(JobIdx, f64)],
        predictor: &mut DegradationModel,
    ) {
        let tenants = &plan.gpu(gpu).tenants;
        for (job, pd) in measured {
            let others = others(plan, tenants, *job);
            predictor.learn(plan.spec(*job).profile, &others, *pd);
        }
        let pd_of = |job: &JobIdx| measured.iter().find(|m| m.0 == *job).map_or(1.0, |m| m.1);
        for job in &session.jobs {
            let Some(training) = &plan.profile(*job).training else { continue };
            let batch = training.batch_of(plan.job(*job).knobs);
            let pd_permille = (1000.0 * pd_of(job)).round().min(1e9) as u32;
            let measured = session.tuner.measured();
            plan.note(*job, Reason::BatchSettled { batch, measured, pd_permille });
            self.last[job.usize()].tuned_noise = plan.job(*job).noise_scale;
        }
        let took = plan.now - session.began;
        self.resting.insert(gpu, plan.now + Span::from_secs(REST * took.secs()));
    }

    /// Begins to search the devices whose tenants changed, once all of them run and were measured. Says whether there was
    /// one where nothing can be tuned, which takes others again.
    pub(crate) fn begin(&mut self, plan: &mut Plan<'_>, predictor: &DegradationModel) -> bool {
        let mut opened = false;
        let looked: Vec<GpuIdx> =
            self.pending.iter().filter(|(_, at)| **at <= plan.now).map(|(g, _)| *g).collect();
        for gpu in looked {
            let tenants = plan.gpu(gpu).tenants.clone();
            let runs = |j: &JobIdx| plan.job(*j).phase == Phase::Running;
            let axes: SmallVec<[(JobIdx, Axis, u32); 4]> = tenants
                .iter()
                .filter_map(|j| self.axis(plan, *j).map(|(axis, now)| (*j, axis, now)))
                .collect();
            let may = tenants.iter().any(|j| plan.profile(*j).training.is_some());
            if !may || (tenants.len() == 1 && self.scope != Scope::All) {
                self.pending.remove(&gpu);
                opened = true;
            } else if tenants.iter().all(runs) && !axes.is_empty() {
                self.pending.remove(&gpu);
                let session = self.session(plan, &axes, predictor);
                self.sessions.insert(gpu, session);
            } else if tenants.iter().all(runs) && self.pending[&gpu] > Time::ZERO {
                // All run and were given the time to be measured: nobody can be tuned.
                self.pending.remove(&gpu);
                opened = true;
            } else {
                self.pending.insert(gpu, plan.now + self.window);
            }
        }
        let due = self.sessions.values().map(|s| s.due).chain(self.pending.values().copied());
        if let Some(at) = due.filter(|at| *at > plan.now).min() {
            plan.wake_at(at);
        }
        opened
    }

    fn session(
        &mut self,
        plan: &Plan<'_>,
        axes: &[(JobIdx, Axis, u32)],
        predictor: &DegradationModel,
    ) -> Session {
        let mut axes: SmallVec<[(JobIdx, Axis, u32); 4]> = axes.iter().copied().collect();
        axes.sort_by_key(|(job, ..)| (plan.spec(*job).profile, *job));
        let jobs: Tenants = axes.iter().map(|a| a.0).collect();
        let asked: Batches = axes.iter().map(|a| a.2).collect();
        let ranges: SmallVec<[Axis; 4]> = axes.iter().map(|a| a.1).collect();
        let mut tuner = Tuner::new(self.options, &ranges, &asked);
        self.warm_up(plan, &jobs, &mut tuner, predictor);
        for job in &jobs {
            self.last[job.usize()].tuned_noise = plan.job(*job).noise_scale;
        }
        let due = plan.now + self.window;
        Session { tuner, jobs, asked, began: plan.now, due, delays: 0, settled: false }
    }

    /// Starts from what the same kinds measured before, or from what was best for similar ones.
    fn warm_up(
        &self,
        plan: &Plan<'_>,
        jobs: &[JobIdx],
        tuner: &mut Tuner,
        predictor: &DegradationModel,
    ) {
        let kinds: SmallVec<[ProfileIdx; 4]> = jobs.iter().map(|j| plan.spec(*j).profile).collect();
        let own = |j: &JobIdx| plan.profile(*j).training.as_ref().map_or(1, |t| t.batch);
        let best = if let Some(same) = self.archive.get(&kinds) {
            for (batches, value) in &same.trials {
                tuner.recall(batches, *value, DOUBT);
            }
            Some(same)
        } else {
            let distance = |other: &SmallVec<[ProfileIdx; 4]>| -> f64 {
                let apart = |(a, b): (&ProfileIdx, &ProfileIdx)| {
                    let (a, b) = (predictor.demand(*a), predictor.demand(*b));
                    (a.sm - b.sm).abs() + (a.dram - b.dram).abs()
                };
                kinds.iter().zip(other).map(apart).sum()
            };
            let alike = self.archive.iter().filter(|(k, _)| k.len() == kinds.len());
            let near = alike.map(|(k, a)| (distance(k), a));
            let near = near.min_by(|a, b| a.0.total_cmp(&b.0));
            near.filter(|(apart, _)| *apart <= SIMILAR * kinds.len() as f64).map(|(_, a)| a)
        };
        if let Some(best) = best.filter(|b| b.times.len() == jobs.len()) {
            let batch = |(j, times): (&JobIdx, &f64)| (f64::from(own(j)) * times).round() as u32;
            let batches: Batches = jobs.iter().zip(&best.times).map(batch).collect();
            tuner.suggest(&batches);
        }
    }

    fn archive(&mut self, plan: &Plan<'_>, session: &Session, mean: f64) {
        let kinds = session.jobs.iter().map(|j| plan.spec(*j).profile).collect();
        let own = |j: &JobIdx| plan.profile(*j).training.as_ref().map_or(1, |t| t.batch);
        let best = session.tuner.best_value().is_some_and(|best| mean <= best);
        let archived = self.archive.entry(kinds).or_default();
        archived.trials.push((session.asked.clone(), mean));
        if archived.trials.len() > KEPT {
            archived.trials.remove(0);
        }
        if best {
            let times = |(j, b): (&JobIdx, &u32)| f64::from(*b) / f64::from(own(j).max(1));
            archived.times = session.jobs.iter().zip(&session.asked).map(times).collect();
        }
    }
}

/// Profiles of the others in a room, ascending.
pub(crate) fn others(plan: &Plan<'_>, room: &[JobIdx], job: JobIdx) -> SmallVec<[ProfileIdx; 4]> {
    let others = room.iter().filter(|j| **j != job);
    let mut kinds: SmallVec<[ProfileIdx; 4]> = others.map(|j| plan.spec(*j).profile).collect();
    kinds.sort_unstable();
    kinds
}

/// A tenant of which nothing was measured yet runs undisturbed, as far as anybody knows.
fn quiet(plan: &Plan<'_>, job: JobIdx) -> Option<f64> {
    (plan.job(job).phase == Phase::Running).then_some(1.0)
}
