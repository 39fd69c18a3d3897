//! Tuning sessions: which GPUs are searched, which batch sizes are applied, and whether the jobs
//! really use them.
//!
//! When the tenants of a GPU have changed, a [`Tuner`] searches the batch sizes of all of them,
//! from the current ones; until it ends the GPU accepts no job. A requested batch size counts only
//! when a sample reports it.

use crate::event::Sample;
use crate::idx::{GpuIdx, IdxSet, IdxVec, JobIdx, ProfileIdx};
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

/// A search on one GPU.
#[derive(Clone, Debug)]
struct Session {
    tuner: Tuner,
    /// Jobs that are tuned, in the order of the tuner's axes.
    jobs: Tenants,
    /// Batch sizes that were last requested of them.
    requested: Batches,
    began: Time,
    /// When the measurement is due.
    due: Time,
    /// How often it was postponed.
    delays: u8,
    /// Whether the search is over, and only its result has to be measured.
    settled: bool,
}

/// Last measurement of a job.
#[derive(Clone, Copy, Debug, Default)]
struct Last {
    step_s: f64,
    batch: u32,
    /// Whether it was taken after the last request for another batch size.
    fresh: bool,
    /// Noise scale of the job at the start, and then at the end, of the last search; 0 = never
    /// searched.
    tuned_noise: f32,
}

/// What is known of a training profile.
#[derive(Clone, Debug)]
struct ProfileLimits {
    memory: MemoryFit,
    /// The largest batch size that is tried: smaller than any that ran out of memory.
    cap: u32,
}

/// Measurements of a group of profiles and the best batch sizes, in the order of the profiles.
#[derive(Clone, Debug, Default)]
struct Archived {
    trials: Vec<(Batches, f64)>,
    /// The best batch sizes, relative to those of the users.
    times: SmallVec<[f64; 4]>,
}

/// Most times that a missing measurement is postponed.
const DELAYS: u8 = 3;
/// Standard deviation of earlier measurements of the same profiles, relative to that of the
/// objective: noise scales change.
const DOUBT: f64 = 0.3;
/// Largest difference of utilisation per job between profiles whose best batch sizes are tried for
/// each other.
const SIMILAR: f64 = 0.3;
/// For this many times the length of its last search, a changed noise scale is no reason to search
/// a GPU again: with few samples the noise scale is itself noisy, and a search also tries bad batch
/// sizes.
const REST: f64 = 10.0;
/// Most measurements of a group that are kept.
const KEPT: usize = 24;

/// Which GPUs are searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// None: batch sizes stay as they are.
    Off,
    /// GPUs with more than one tenant.
    Shared,
    /// Also GPUs with one tenant.
    All,
}

/// Tuning of all GPUs.
#[derive(Clone, Debug)]
pub(crate) struct Tuning {
    options: Options,
    window: Span,
    drift: f64,
    scope: Scope,
    sessions: BTreeMap<GpuIdx, Session>,
    /// GPUs to be searched, with the time of the next attempt to begin.
    pending: BTreeMap<GpuIdx, Time>,
    /// Until when a changed noise scale is no reason to search a GPU again.
    resting: BTreeMap<GpuIdx, Time>,
    last: IdxVec<JobIdx, Last>,
    limits: IdxVec<ProfileIdx, ProfileLimits>,
    /// Jobs that do not apply requested batch sizes.
    unresponsive: IdxSet<JobIdx>,
    archive: BTreeMap<SmallVec<[ProfileIdx; 4]>, Archived>,
}

impl Tuning {
    /// Searches the GPUs of a `scope` with these options and measurements of length `window`, and
    /// again when a noise scale has changed by the factor `drift`.
    pub(crate) fn new(options: Options, window: Span, drift: f64, scope: Scope) -> Self {
        Self {
            options,
            window,
            drift,
            scope,
            sessions: BTreeMap::new(),
            pending: BTreeMap::new(),
            resting: BTreeMap::new(),
            last: IdxVec::new(),
            limits: IdxVec::new(),
            unresponsive: IdxSet::default(),
            archive: BTreeMap::new(),
        }
    }

    /// Grows the tables to all known jobs and profiles.
    pub(crate) fn resize(&mut self, plan: &Plan<'_>) {
        self.last.grow_like(&plan.jobs, Last::default());
        let new = ProfileLimits { memory: MemoryFit::default(), cap: u32::MAX };
        self.limits.grow_like(&plan.profiles, new);
    }

    /// Whether the GPU is tuned, or about to be, and accepts no job.
    pub(crate) fn is_busy(&self, gpu: GpuIdx) -> bool {
        self.sessions.contains_key(&gpu) || self.pending.contains_key(&gpu)
    }

    /// The tenants of the GPU have changed: its search is void.
    pub(crate) fn unsettle(&mut self, gpu: GpuIdx) {
        self.sessions.remove(&gpu);
        self.search_soon(gpu);
    }

    /// Marks the GPU for a search, if anything is to be tuned.
    fn search_soon(&mut self, gpu: GpuIdx) {
        if self.scope != Scope::Off {
            self.pending.insert(gpu, Time::ZERO);
        }
    }

    /// Processes a sample of a running job.
    pub(crate) fn sampled(&mut self, plan: &mut Plan<'_>, job: JobIdx, sample: &Sample) {
        let last = &mut self.last[job];
        if sample.step_s > 0.0 {
            last.step_s = sample.step_s.get();
            last.batch = sample.batch;
            last.fresh = true;
        }
        if sample.batch > 0 && sample.mem_mib > 0 {
            let profile = plan.spec(job).profile;
            self.limits[profile].memory.observe(sample.batch, sample.mem_mib);
        }
        let (was, is) = (last.tuned_noise, sample.noise_scale.get());
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
        // The first noise scale of a job that started or was measured late: its roommates were
        // tuned without it, or nothing was.
        let searched = plan.gpu(gpu).tenants.len() > 1 || self.scope == Scope::All;
        if was == 0.0 && searched && self.axis(plan, job).is_some() {
            self.search_soon(gpu);
        }
    }

    /// A job ran out of memory. If its batch size was larger than its own, its profile is not tuned
    /// to that size or above again.
    pub(crate) fn ran_out_of_memory(&mut self, plan: &Plan<'_>, job: JobIdx) {
        // Knobs are reset only when the job starts again.
        let batch = plan.job(job).knobs.batch;
        let own = plan.profile(job).training.as_ref().map_or(0, |t| t.batch);
        if batch > own {
            let cap = &mut self.limits[plan.spec(job).profile].cap;
            *cap = (*cap).min(batch - 1).max(own);
        }
    }

    /// A job lost its GPUs; its roommates are tuned again.
    pub(crate) fn left(&mut self, job: JobIdx) {
        self.last[job] = Last::default();
        self.unresponsive.remove(job);
        let with: Vec<GpuIdx> =
            self.sessions.iter().filter(|(_, s)| s.jobs.contains(&job)).map(|(g, _)| *g).collect();
        with.into_iter().for_each(|gpu| self.unsettle(gpu));
    }

    /// Degradation of a job according to its last sample.
    pub(crate) fn degradation(&self, plan: &Plan<'_>, job: JobIdx) -> Option<f64> {
        let Last { step_s, batch, .. } = self.last[job];
        let current = plan.job(job);
        if step_s <= 0.0 || current.phase != Phase::Running {
            return None;
        }
        let alone_s = plan.alone_step_s(job, &current.gpus);
        let pd = match &plan.profile(job).training {
            Some(t) if batch > 0 && batch != t.batch => {
                let [m0, m] = [t.batch, batch].map(f64::from);
                goodput::degradation(alone_s, step_s, m0, m, f64::from(current.noise_scale))
            }
            _ => step_s / alone_s,
        };
        (pd.is_finite() && pd > 0.0).then_some(pd)
    }

    /// Range of batch sizes of a job, and its current one, if it can be tuned now.
    fn axis(&self, plan: &Plan<'_>, job: JobIdx) -> Option<(Axis, u32)> {
        let training = plan.profile(job).training.as_ref()?;
        let current = plan.job(job);
        let now = training.batch_of(current.knobs);
        let cap = self.limits[plan.spec(job).profile].cap;
        let axis = Axis { low: training.batch_min, high: training.batch_max.min(cap).max(now) };
        let tunable = current.noise_scale > 0.0
            && training.is_sane()
            && axis.low < axis.high
            && axis.low <= now
            && current.gpus.len() == 1
            && !self.unresponsive.contains(job);
        tunable.then_some((axis, now))
    }
}

/// Memory limit of a job at a batch size: an upper bound that it will hardly exceed; 0 = no limit.
fn limit_mib(
    plan: &Plan<'_>,
    limits: &IdxVec<ProfileIdx, ProfileLimits>,
    job: JobIdx,
    training: &Training,
    batch: u32,
) -> u32 {
    let (spec, knobs) = (plan.spec(job), plan.job(job).knobs);
    if knobs.mem_mib == 0 {
        return 0;
    }
    let known = &limits[spec.profile].memory;
    let upper = if known.is_known() {
        known.upper_mib(batch)
    } else {
        // Nothing was measured: the current limit is taken as the memory at the current batch size.
        let mut booked = MemoryFit::default();
        booked.observe(training.batch_of(knobs), knobs.mem_mib);
        booked.upper_mib(batch)
    };
    let upper = upper.unwrap_or(knobs.mem_mib).max(1);
    // At its own batch size a job keeps the memory that its user requested; with less, part of it
    // would be in host memory.
    if batch == training.batch { upper.max(spec.knobs.mem_mib) } else { upper }
}

fn capacity_mib(plan: &Plan<'_>, gpu: GpuIdx) -> u32 {
    plan.gpu_models[usize::from(plan.gpu(gpu).gpu_model)].mem_mib
}

/// Memory that a tenant has if it is brought back to its own batch size.
fn least_mib(plan: &Plan<'_>, job: JobIdx) -> u32 {
    plan.job(job).knobs.mem_mib.min(plan.spec(job).knobs.mem_mib)
}

/// Whether the memory suffices for the job if all tenants have no more than they requested.
pub(crate) fn could_hold(plan: &Plan<'_>, job: JobIdx, gpu: GpuIdx) -> bool {
    let all = u64::from(capacity_mib(plan, gpu));
    let tenants = plan.gpu(gpu).tenants.iter().map(|t| u64::from(least_mib(plan, *t)));
    all == 0 || tenants.sum::<u64>() + u64::from(plan.spec(job).knobs.mem_mib) <= all
}

/// Brings tenants back to their own batch sizes, those that grew most first, until the job fits.
pub(crate) fn make_room(plan: &mut Plan<'_>, job: JobIdx, gpu: GpuIdx) {
    let all = u64::from(capacity_mib(plan, gpu));
    let requested = u64::from(plan.spec(job).knobs.mem_mib);
    let mut tenants = plan.gpu(gpu).tenants.clone();
    let grown = |plan: &Plan<'_>, t: JobIdx| plan.job(t).knobs.mem_mib - least_mib(plan, t);
    tenants.sort_by_key(|t| (std::cmp::Reverse(grown(plan, *t)), *t));
    for tenant in tenants {
        let used = u64::from(plan.gpu(gpu).mem_used_mib);
        if all == 0 || used + requested <= all || grown(plan, tenant) == 0 {
            return;
        }
        let own = plan.spec(tenant).knobs;
        let knobs = Knobs { batch: own.batch, ..plan.job(tenant).knobs };
        let _ = plan.tune(tenant, Knobs { mem_mib: own.mem_mib, ..knobs });
    }
}

// Searches.
impl Tuning {
    /// Continues the searches whose measurements are due.
    pub(crate) fn advance(&mut self, plan: &mut Plan<'_>, predictor: &mut DegradationModel) {
        let due = self.sessions.iter().filter(|(_, s)| s.due <= plan.now);
        let due: Vec<GpuIdx> = due.map(|(g, _)| *g).collect();
        for gpu in due {
            let Some(session) = self.sessions.remove(&gpu) else { continue };
            let there = |j: &JobIdx| plan.gpu(gpu).tenants.contains(j);
            if session.jobs.iter().all(there) {
                self.continue_search(plan, gpu, session, predictor);
            } else {
                self.unsettle(gpu);
            }
        }
    }

    fn continue_search(
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
        session.tuner.observe(&session.requested, mean);
        self.archive(plan, &session, mean);
        let turn = session.tuner.next(&|batches| self.fits(plan, gpu, &session.jobs, batches));
        let (batches, settled) = match turn {
            Turn::Measure(batches) => (batches, false),
            Turn::Settle(batches) => (batches, true),
        };
        if batches == session.requested && settled {
            self.end(plan, gpu, &session, &measured, predictor);
            return;
        }
        // If the batch sizes do not fit after all, the current ones are the result.
        let applied = self.apply(plan, &session.jobs, &batches);
        session.settled = settled || !applied;
        if applied {
            session.requested = batches;
        }
        session.due = plan.now + self.window;
        self.sessions.insert(gpu, session);
    }

    /// Degradations of all tenants, if every tuned job has reported the requested batch size since
    /// it was requested.
    fn measured(
        &self,
        plan: &Plan<'_>,
        gpu: GpuIdx,
        session: &Session,
    ) -> Option<Vec<(JobIdx, f64)>> {
        for (job, requested) in session.jobs.iter().zip(&session.requested) {
            let Last { batch, fresh, .. } = self.last[*job];
            if !fresh || batch != *requested {
                return None;
            }
        }
        let tenants = plan.gpu(gpu).tenants.iter();
        tenants
            .map(|j| Some((*j, self.degradation(plan, *j).or_else(|| not_slowed(plan, *j))?)))
            .collect()
    }

    /// Stops tuning jobs that still use another batch size than requested, and tunes the remaining
    /// ones anew.
    fn give_up_unresponsive(&mut self, plan: &mut Plan<'_>, gpu: GpuIdx, session: &Session) {
        for (job, requested) in session.jobs.iter().zip(&session.requested) {
            let Last { batch, fresh, .. } = self.last[*job];
            if !fresh || batch != *requested {
                self.unresponsive.insert(*job);
                plan.note(*job, Reason::BatchNotApplied { batch: *requested });
            }
        }
        self.search_soon(gpu);
    }

    /// Whether batch sizes fit for certain, beside the memory of tenants that are not tuned.
    fn fits(&self, plan: &Plan<'_>, gpu: GpuIdx, jobs: &[JobIdx], batches: &[u32]) -> bool {
        let all = u64::from(capacity_mib(plan, gpu));
        if all == 0 {
            return true;
        }
        let takes = |job: &JobIdx| {
            let current = u64::from(plan.job(*job).knobs.mem_mib);
            let at = jobs.iter().position(|j| j == job);
            match (at, &plan.profile(*job).training) {
                (Some(i), Some(t)) => u64::from(limit_mib(plan, &self.limits, *job, t, batches[i])),
                _ => current,
            }
        };
        plan.gpu(gpu).tenants.iter().map(takes).sum::<u64>() <= all
    }

    /// Requests batch sizes of the jobs, those that free memory first. A job whose batch size
    /// changes has to be measured again.
    fn apply(&mut self, plan: &mut Plan<'_>, jobs: &[JobIdx], batches: &[u32]) -> bool {
        let mut turns: SmallVec<[(i64, JobIdx, Knobs); 4]> = SmallVec::new();
        for (job, batch) in jobs.iter().zip(batches) {
            let Some(training) = &plan.profile(*job).training else { continue };
            let now = plan.job(*job).knobs;
            if training.batch_of(now) == *batch {
                continue;
            }
            let mem_mib = limit_mib(plan, &self.limits, *job, training, *batch);
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
            self.last[job].fresh = false;
        }
        true
    }

    /// The result of a search was measured: ends the search.
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
            self.last[*job].tuned_noise = plan.job(*job).noise_scale;
        }
        let took = plan.now - session.began;
        self.resting.insert(gpu, plan.now + Span::from_secs(REST * took.secs()));
    }

    /// Begins searches on GPUs whose tenants have changed, once all of them run and were measured.
    /// Returns whether there was a GPU where nothing can be tuned, which accepts jobs again.
    pub(crate) fn begin(&mut self, plan: &mut Plan<'_>, predictor: &DegradationModel) -> bool {
        let mut opened = false;
        let due: Vec<GpuIdx> =
            self.pending.iter().filter(|(_, at)| **at <= plan.now).map(|(g, _)| *g).collect();
        for gpu in due {
            let tenants = plan.gpu(gpu).tenants.clone();
            let runs = |j: &JobIdx| plan.job(*j).phase == Phase::Running;
            let axes: SmallVec<[(JobIdx, Axis, u32); 4]> = tenants
                .iter()
                .filter_map(|j| self.axis(plan, *j).map(|(axis, now)| (*j, axis, now)))
                .collect();
            let any_training = tenants.iter().any(|j| plan.profile(*j).training.is_some());
            if !any_training || (tenants.len() == 1 && self.scope != Scope::All) {
                self.pending.remove(&gpu);
                opened = true;
            } else if tenants.iter().all(runs) && !axes.is_empty() {
                self.pending.remove(&gpu);
                let session = self.session(plan, &axes, predictor);
                self.sessions.insert(gpu, session);
            } else if tenants.iter().all(runs) && self.pending[&gpu] > Time::ZERO {
                // All tenants run and have had time to be measured: none can be tuned.
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
        let requested: Batches = axes.iter().map(|a| a.2).collect();
        let ranges: SmallVec<[Axis; 4]> = axes.iter().map(|a| a.1).collect();
        let mut tuner = Tuner::new(self.options, &ranges, &requested);
        self.warm_up(plan, &jobs, &mut tuner, predictor);
        for job in &jobs {
            self.last[*job].tuned_noise = plan.job(*job).noise_scale;
        }
        let due = plan.now + self.window;
        Session { tuner, jobs, requested, began: plan.now, due, delays: 0, settled: false }
    }

    /// Starts from earlier measurements of the same profiles, or from the best batch sizes of
    /// similar ones.
    fn warm_up(
        &self,
        plan: &Plan<'_>,
        jobs: &[JobIdx],
        tuner: &mut Tuner,
        predictor: &DegradationModel,
    ) {
        let profiles: SmallVec<[ProfileIdx; 4]> =
            jobs.iter().map(|j| plan.spec(*j).profile).collect();
        let own = |j: &JobIdx| plan.profile(*j).training.as_ref().map_or(1, |t| t.batch);
        let best = if let Some(same) = self.archive.get(&profiles) {
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
                profiles.iter().zip(other).map(apart).sum()
            };
            let alike = self.archive.iter().filter(|(k, _)| k.len() == profiles.len());
            let near = alike.map(|(k, a)| (distance(k), a));
            let near = near.min_by(|a, b| a.0.total_cmp(&b.0));
            near.filter(|(apart, _)| *apart <= SIMILAR * profiles.len() as f64).map(|(_, a)| a)
        };
        if let Some(best) = best.filter(|b| b.times.len() == jobs.len()) {
            let batch = |(j, times): (&JobIdx, &f64)| (f64::from(own(j)) * times).round() as u32;
            let batches: Batches = jobs.iter().zip(&best.times).map(batch).collect();
            tuner.suggest(&batches);
        }
    }

    fn archive(&mut self, plan: &Plan<'_>, session: &Session, mean: f64) {
        let profiles = session.jobs.iter().map(|j| plan.spec(*j).profile).collect();
        let own = |j: &JobIdx| plan.profile(*j).training.as_ref().map_or(1, |t| t.batch);
        let best = session.tuner.best_value().is_some_and(|best| mean <= best);
        let archived = self.archive.entry(profiles).or_default();
        archived.trials.push((session.requested.clone(), mean));
        if archived.trials.len() > KEPT {
            archived.trials.remove(0);
        }
        if best {
            let times = |(j, b): (&JobIdx, &u32)| f64::from(*b) / f64::from(own(j).max(1));
            archived.times = session.jobs.iter().zip(&session.requested).map(times).collect();
        }
    }
}

/// Profiles of the roommates of a job, ascending.
pub(crate) fn others(
    plan: &Plan<'_>,
    tenants: &[JobIdx],
    job: JobIdx,
) -> SmallVec<[ProfileIdx; 4]> {
    let others = tenants.iter().filter(|j| **j != job);
    let mut profiles: SmallVec<[ProfileIdx; 4]> = others.map(|j| plan.spec(*j).profile).collect();
    profiles.sort_unstable();
    profiles
}

/// A running tenant that was not measured yet is assumed to be as fast as alone.
fn not_slowed(plan: &Plan<'_>, job: JobIdx) -> Option<f64> {
    (plan.job(job).phase == Phase::Running).then_some(1.0)
}
