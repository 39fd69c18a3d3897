//! Who leaves GPUs: tenants that cost their roommates more than they are worth, roommates of a job
//! whose promise would be broken, training beside a service that wants to be alone, and jobs that
//! gain by moving to idle GPUs.

use super::{Roommate, permille};
use crate::idx::{GpuIdx, GpuSet, IdxSet, JobIdx};
use crate::job::{Class, Phase};
use crate::placement::{self, Rule};
use crate::plan::Plan;
use crate::reason::Reason;
use crate::state::State;
use crate::time::Time;
use smallvec::SmallVec;

/// Most moves at one instant: each is decided as if the others did not happen.
const MOST_MOVES: u32 = 4;
/// A move has to make the job this much faster, or its roommates by as much of its value.
const WORTH_MOVING: f64 = 0.05;
/// Most jobs that one look considers for moving.
const MOST_MOVABLE: usize = 512;

/// Whose turn it is to be considered for moving, where there are too many jobs for one instant.
#[derive(Default)]
pub(super) struct Turns {
    at: Time,
    /// The last job before those of this instant, and before those of the next.
    after: Option<JobIdx>,
    next: Option<JobIdx>,
}

impl Turns {
    fn take_from(&mut self, now: Time, jobs: &IdxSet<JobIdx>) -> Vec<JobIdx> {
        if jobs.len() <= MOST_MOVABLE {
            return jobs.iter().collect();
        }
        if self.at != now {
            (self.at, self.after) = (now, self.next);
        }
        let first = jobs.next_after(self.after).or(jobs.first());
        let following = std::iter::successors(first, |j| jobs.next_after(Some(*j)));
        let taken: Vec<JobIdx> = following.take(MOST_MOVABLE).collect();
        self.next = taken.last().copied();
        taken
    }
}

impl Roommate {
    /// Training roommates of a placed job, each once.
    fn roommates(state: &State, job: JobIdx) -> SmallVec<[JobIdx; 8]> {
        let mut found: SmallVec<[JobIdx; 8]> = SmallVec::new();
        let trains = |t: &JobIdx| *t != job && state.spec(*t).class != Class::Service;
        for gpu in &state.job(job).gpus {
            found.extend(state.gpu(*gpu).tenants.iter().copied().filter(trains));
        }
        found.sort_unstable();
        found.dedup();
        found
    }

    /// What the roommates of a placed job gain per second when it leaves, and the sum of the
    /// speeds they gain.
    fn relief(&self, plan: &mut Plan<'_>, job: JobIdx) -> (f64, f64) {
        let others = Self::roommates(plan, job);
        let before: SmallVec<[f64; 8]> = others.iter().map(|o| self.speed(plan, *o)).collect();
        let mark = plan.mark();
        plan.release(job);
        let (mut gain, mut speeds) = (0.0, 0.0);
        for (other, before) in others.iter().zip(before) {
            let faster = self.believed.speed(plan, *other) - before;
            gain += self.value(plan, *other) * faster;
            speeds += faster;
        }
        plan.undo_to(mark);
        (gain, speeds)
    }

    fn suspend(&mut self, plan: &mut Plan<'_>, job: JobIdx, reason: Reason) {
        let gpus = plan.job(job).gpus.clone();
        plan.note(job, reason);
        plan.suspend(job);
        self.vacated(job);
        self.refresh(plan, &gpus);
    }

    /// Whether a tenant can leave now: training that runs, and did not just begin.
    fn can_leave(plan: &Plan<'_>, tenant: JobIdx) -> bool {
        let hot = plan.job(tenant);
        hot.phase == Phase::Running
            && hot.since != plan.now
            && plan.spec(tenant).class != Class::Service
    }

    /// Suspends tenants of GPUs that were just measured, where the others gain more than they do.
    /// Only where it is known how fast each is alone: otherwise their samples do not say what they
    /// cost each other, and jobs that do well together would be parted on a guess.
    pub(super) fn take_apart(&mut self, plan: &mut Plan<'_>) {
        let measured = std::mem::take(&mut self.measured);
        for gpu in &measured {
            let tenants = plan.gpu(*gpu).tenants.clone();
            let is_known = |t: &JobIdx| plan.belief_on(*t, &plan.job(*t).gpus).is_measured;
            if tenants.len() < 2 || !tenants.iter().all(is_known) {
                continue;
            }
            let mut worst: Option<(f64, JobIdx, Reason)> = None;
            for tenant in tenants {
                if !Self::can_leave(plan, tenant) {
                    continue;
                }
                let speed = self.speed(plan, tenant);
                let own = self.value(plan, tenant) * speed * (1.0 + self.params.apart);
                let (gain, faster) = self.relief(plan, tenant);
                if gain > own && worst.is_none_or(|(most, ..)| gain - own > most) {
                    let (gain_permille, own_permille) = (permille(faster), permille(speed));
                    let reason = Reason::RoommatesGain { gain_permille, own_permille };
                    worst = Some((gain - own, tenant, reason));
                }
            }
            if let Some((_, tenant, reason)) = worst {
                self.suspend(plan, tenant, reason);
            }
        }
        self.measured = measured;
    }

    /// Holds roommates of promised jobs back, or suspends them where that does not keep a promise.
    pub(super) fn keep_promises(&mut self, plan: &mut Plan<'_>) {
        let mut gpus = std::mem::take(&mut self.measured);
        if self.version != plan.pairs.version() {
            let promised = |j: &JobIdx| plan.spec(*j).max_slowdown.is_some();
            let shared = self.sharing.iter().filter(promised);
            gpus.extend(shared.flat_map(|j| plan.job(j).gpus.iter().copied()));
            gpus.sort_unstable();
            gpus.dedup();
        }
        for gpu in gpus {
            self.keep_promises_on(plan, gpu);
        }
        for (job, slowdown) in std::mem::take(&mut self.broken) {
            if !plan.job(job).is_placed() || plan.is_alone(job) {
                continue;
            }
            let gpus = plan.job(job).gpus.clone();
            self.look_soon = true;
            if self.believed.tighten(plan, job, slowdown) {
                self.refresh(plan, &gpus);
                continue;
            }
            if let Some(victim) = self.cheapest(plan, self.worst_room(plan, job), job) {
                self.suspend(plan, victim, Reason::PromiseTo(job));
            }
        }
    }

    /// The GPU of a placed job on which its roommates are believed to cost it most.
    fn worst_room(&self, plan: &Plan<'_>, job: JobIdx) -> GpuIdx {
        let left = |gpu: &GpuIdx| {
            let at = plan.gpu(*gpu).tenants.iter().position(|t| *t == job);
            self.believed.settled_or_squeezed(plan, *gpu).left[at.unwrap_or(0)]
        };
        let gpus = plan.job(job).gpus.iter().copied();
        gpus.min_by(|a, b| left(a).total_cmp(&left(b))).expect("a placed job has GPUs")
    }

    /// The tenant of a GPU that leaves for a promised job: one without a promise, of least value.
    fn cheapest(&self, plan: &Plan<'_>, gpu: GpuIdx, stays: JobIdx) -> Option<JobIdx> {
        let promised = |j: &JobIdx| plan.spec(*j).max_slowdown.is_some();
        let worth = |j: &JobIdx| self.value(plan, *j) * self.speed(plan, *j);
        let tenants = plan.gpu(gpu).tenants.iter().copied();
        let leaving = tenants.filter(|t| *t != stays && Self::can_leave(plan, *t));
        leaving.min_by(|a, b| promised(a).cmp(&promised(b)).then(worth(a).total_cmp(&worth(b))))
    }

    fn keep_promises_on(&mut self, plan: &mut Plan<'_>, gpu: GpuIdx) {
        // What was learned may call for other knobs.
        let promised = |j: &JobIdx| plan.spec(*j).max_slowdown.is_some();
        let Some(first) = plan.gpu(gpu).tenants.iter().copied().find(promised) else { return };
        self.changed.push(gpu);
        loop {
            let on = plan.gpu(gpu);
            if on.tenants.len() < 2
                || self.believed.settle(plan, on.gpu_model, &on.tenants).is_some()
            {
                return;
            }
            let Some(victim) = self.cheapest(plan, gpu, first) else { return };
            self.suspend(plan, victim, Reason::PromiseTo(first));
        }
    }

    /// Suspends training beside services that want to be alone.
    pub(super) fn serve(&mut self, plan: &mut Plan<'_>) {
        for gpu in self.changed.clone() {
            if !self.services.want_alone(plan, gpu) {
                continue;
            }
            let tenants = plan.gpu(gpu).tenants.clone();
            let service = tenants.iter().find(|t| plan.spec(**t).class == Class::Service);
            let Some(service) = service.copied() else { continue };
            for tenant in tenants {
                if Self::can_leave(plan, tenant) {
                    self.suspend(plan, tenant, Reason::PausedFor(service));
                }
            }
        }
    }

    /// Moves the job that gains most by it to idle GPUs; whether there is one.
    pub(super) fn move_one(&mut self, plan: &mut Plan<'_>) -> bool {
        let moved = if self.moves.0 == plan.now { self.moves.1 } else { 0 };
        if !self.params.migrate || moved >= MOST_MOVES || plan.idle_gpus() == 0 {
            return false;
        }
        let one_model = plan.gpu_models.len() == 1;
        let from = if one_model { &self.sharing } else { &plan.placed };
        let candidates = self.turns.take_from(plan.now, from);
        let mut best: Option<(f64, JobIdx, GpuSet, Reason)> = None;
        for job in candidates {
            let Some((net, gpus, reason)) = self.move_of(plan, job) else { continue };
            if best.as_ref().is_none_or(|(most, ..)| net > *most) {
                best = Some((net, job, gpus, reason));
            }
        }
        let Some((_, job, gpus, reason)) = best else { return false };
        let before = plan.job(job).gpus.clone();
        let knobs = plan.job(job).knobs;
        plan.release(job);
        let placed = plan.place(job, &gpus, knobs);
        debug_assert!(placed.is_ok(), "the GPUs were found idle");
        plan.note(job, reason);
        self.rooms[job].clone_from(&gpus);
        self.refresh(plan, &before);
        self.refresh(plan, &gpus);
        self.moves = (plan.now, moved + 1);
        true
    }

    /// What is gained in all by moving a job to idle GPUs, if it pays, and the GPUs.
    fn move_of(&self, plan: &mut Plan<'_>, job: JobIdx) -> Option<(f64, GpuSet, Reason)> {
        let width = plan.job(job).gpus.len();
        if !self.is_movable(plan, job)
            || width != usize::from(plan.spec(job).gpus)
            || (plan.idle_for(job) as usize) < width
        {
            return None;
        }
        let shares = !plan.is_alone(job);
        if plan.gpu_models.len() == 1 && !shares {
            return None;
        }
        let (value, speed) = (self.value(plan, job), self.speed(plan, job));
        let horizon_s = self.horizon_s(plan, job);
        let cost = plan.move_cost(job).secs() * value * self.params.move_gain;
        // At best it runs at full speed, on the fastest GPUs, and its roommates alone.
        let models = 0..plan.gpu_models.len() as u8;
        let usable = models.filter(|m| plan.spec(job).allows(*m) && plan.idle.gpus(*m) > 0);
        let fastest = usable.map(|m| plan.speed_on(job, m)).fold(0.0, f64::max);
        let others = Self::roommates(plan, job);
        let most = |o: &JobIdx| {
            let alone = plan.solo_speed(*o, &plan.job(*o).gpus);
            self.value(plan, *o) * (alone - self.speed(plan, *o))
        };
        let at_best = others.iter().map(most).sum::<f64>() + value * (fastest - speed);
        if at_best * horizon_s <= cost {
            return None;
        }
        let (relief, faster) = if shares { self.relief(plan, job) } else { (0.0, 0.0) };
        let pays = |faster: f64| {
            let gain = relief + value * faster;
            (gain > WORTH_MOVING * value * speed && gain * horizon_s > cost)
                .then_some(gain * horizon_s - cost)
        };
        pays(fastest - speed)?;
        let gpus = placement::find(plan, job, Rule::Consolidated)?;
        let knobs = plan.job(job).knobs;
        let there = plan.solo_speed(job, &gpus);
        let net = pays(there - speed)?;
        let mark = plan.mark();
        plan.release(job);
        let fits = plan.place(job, &gpus, knobs).is_ok();
        plan.undo_to(mark);
        let reason = Reason::MovesToIdle {
            from_permille: permille(speed),
            to_permille: permille(there),
            gain_permille: permille(faster),
        };
        fits.then_some((net, gpus, reason))
    }
}
