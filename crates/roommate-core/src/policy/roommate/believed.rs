//! What is believed of roommates: how fast each tenant of a GPU is, and how far the roommates of a
//! promised job have to be held back so that its promise is kept.

use super::Roommate;
use crate::idx::{GpuIdx, IdxVec, JobIdx, ProfileIdx};
use crate::job::Class;
use crate::knobs::Knobs;
use crate::performance::pairs;
use crate::plan::Plan;
use crate::state::State;
use smallvec::SmallVec;
use std::cell::Cell;

/// How far the roommates of a promised job are held back, from nothing on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Guard {
    /// All are equal.
    #[default]
    None,
    /// The promised job has priority.
    Priority,
    /// The others are confined to three quarters of the SMs as well.
    Confined,
    /// The others are confined to a third.
    Squeezed,
}

impl Guard {
    const ALL: [Self; 4] = [Self::None, Self::Priority, Self::Confined, Self::Squeezed];

    /// The knobs of a tenant under this guard.
    pub(super) fn knobs(self, promised: bool, knobs: Knobs) -> Knobs {
        let priority = promised && self >= Self::Priority;
        let sm_most_permille = match self {
            Self::Confined if !promised => Self::CONFINED_PERMILLE,
            Self::Squeezed if !promised => Self::SQUEEZED_PERMILLE,
            _ => Knobs::SM_ALL,
        };
        Knobs { sm_most_permille: kept(sm_most_permille, knobs), priority, ..knobs }
    }

    /// 96 and 48 of the 132 SMs of the GPU on which they were measured.
    const CONFINED_PERMILLE: u16 = 727;
    const SQUEEZED_PERMILLE: u16 = 364;
}

/// Most tenants for which speeds are kept on the stack.
const USUAL_TENANTS: usize = 8;

/// A number for each tenant of a GPU.
pub(super) type PerTenant<T> = SmallVec<[T; USUAL_TENANTS]>;

/// A limit that leaves a tenant the part of the GPU that is promised to it.
fn kept(most_permille: u16, knobs: Knobs) -> u16 {
    let part = Some(knobs.sm_permille).filter(|part| *part < Knobs::SM_ALL);
    most_permille.max(part.unwrap_or(0))
}

/// The tenants of a GPU when their knobs are set as promises need.
pub(super) struct Settled {
    pub(super) guard: Guard,
    /// Speed of each tenant relative to alone on this GPU.
    pub(super) left: PerTenant<f64>,
}

/// Extra length of a step by kind of work and roommate's kind, computed when it is asked for.
#[derive(Default)]
pub(super) struct Believed {
    /// The number of each profile's kind among the kinds.
    kinds: IdxVec<ProfileIdx, u32>,
    /// Number of kinds.
    count: usize,
    /// By GPU model, own kind, roommate's kind: the version of the pairs it was computed from, and
    /// the extra; empty if there are too many kinds.
    extras: Vec<Cell<(u64, f64)>>,
    /// The least guard of each promised job where it is: beliefs alone did not keep its promise.
    least: IdxVec<JobIdx, Guard>,
}

impl Believed {
    /// Largest table that is kept.
    const MOST: usize = 1 << 18;

    /// Takes in profiles that were added.
    pub(super) fn refresh(&mut self, state: &State) {
        let before = self.count;
        for profile in state.profiles.indices().skip(self.kinds.len()) {
            let kind = state.kind(profile);
            if kind == profile {
                self.kinds.push(self.count as u32);
                self.count += 1;
            } else {
                self.kinds.push(self.kinds[kind]);
            }
        }
        if self.count > before {
            let size = self.count * self.count * state.gpu_models.len();
            self.extras.clear();
            let unknown = Cell::new((u64::MAX, 0.0));
            self.extras.resize(if size > Self::MOST { 0 } else { size }, unknown);
        }
    }

    fn extra(&self, state: &State, gpu_model: u8, own: ProfileIdx, other: ProfileIdx) -> f64 {
        let [a, b] = [own, other].map(|p| self.kinds[p] as usize);
        let at = (usize::from(gpu_model) * self.count + a) * self.count + b;
        let Some(cell) = self.extras.get(at) else {
            return pairs::extra(state, gpu_model, own, other);
        };
        let (version, known) = cell.get();
        if version == state.pairs.version() {
            return known;
        }
        let extra = pairs::extra(state, gpu_model, own, other);
        cell.set((state.pairs.version(), extra));
        extra
    }

    /// Speed that roommates leave a job among these tenants of a GPU, with their knobs.
    fn left(
        &self,
        state: &State,
        gpu_model: u8,
        tenants: &[(JobIdx, Knobs)],
        (job, knobs): (JobIdx, Knobs),
    ) -> f64 {
        let own = state.spec(job).profile;
        let others = tenants.iter().filter(|(t, _)| *t != job);
        let extra = |(t, theirs): &(JobIdx, Knobs)| {
            let extra = self.extra(state, gpu_model, own, state.spec(*t).profile);
            extra * pairs::weight_of(knobs, *theirs)
        };
        let left = 1.0 / (1.0 + others.map(extra).sum::<f64>());
        // Half of the SMs give more than half of the speed; a rule of thumb.
        left.min(knobs.reach().sqrt())
    }

    /// The speeds of these tenants on one GPU with as little held back as promises allow; `None`
    /// if no guard keeps them.
    pub(super) fn settle(
        &self,
        state: &State,
        gpu_model: u8,
        tenants: &[JobIdx],
    ) -> Option<Settled> {
        let is_special = |job: &JobIdx| {
            let spec = state.spec(*job);
            spec.max_slowdown.is_some() || spec.class == Class::Service
        };
        if !tenants.iter().any(is_special) {
            return Some(self.equals(state, gpu_model, tenants));
        }
        let least = tenants.iter().filter_map(|t| self.least.get(*t)).max().copied();
        let guards = Guard::ALL.iter().filter(|guard| Some(**guard) >= least);
        guards.into_iter().find_map(|guard| {
            let settled = self.under(state, gpu_model, tenants, *guard);
            let kept = |(job, left): (&JobIdx, &f64)| {
                let most = state.spec(*job).max_slowdown;
                most.is_none_or(|most| *left * most.get() >= 1.0)
            };
            tenants.iter().zip(&settled.left).all(kept).then_some(settled)
        })
    }

    /// What was measured of a promised job beside its roommates is forgotten: it left them.
    pub(super) fn forget(&mut self, job: JobIdx) {
        if let Some(least) = self.least.get_mut(job) {
            *least = Guard::None;
        }
    }

    /// Holds the roommates of a promised job further back, after it was measured at this slowdown;
    /// whether that can keep its promise.
    pub(super) fn tighten(&mut self, state: &State, job: JobIdx, slowdown: f64) -> bool {
        let Some(most) = state.spec(job).max_slowdown else { return true };
        let gpus = &state.job(job).gpus;
        let at = |gpu: &GpuIdx| {
            state.gpu(*gpu).tenants.iter().position(|t| *t == job).expect("it is on its GPUs")
        };
        let now = gpus.iter().map(|g| self.settled_or_squeezed(state, *g).guard).max();
        let now = now.unwrap_or_default();
        let slowest = |guard: Guard| {
            let left = gpus.iter().map(|g| {
                let on = state.gpu(*g);
                self.under(state, on.gpu_model, &on.tenants, guard).left[at(g)]
            });
            1.0 / left.fold(1.0, f64::min)
        };
        // It suffers more than is believed: so it does under other guards.
        let ratio = (slowdown - 1.0) / (slowest(now) - 1.0).max(1e-3);
        let keeps = |guard: &Guard| 1.0 + (slowest(*guard) - 1.0) * ratio <= most.get();
        let next = Guard::ALL.into_iter().filter(|guard| *guard > now).find(keeps);
        self.least.grow_like(&state.jobs, Guard::None);
        self.least[job] = next.unwrap_or(now);
        next.is_some()
    }

    /// The speeds of tenants of whom nobody has priority.
    fn equals(&self, state: &State, gpu_model: u8, tenants: &[JobIdx]) -> Settled {
        let profiles: PerTenant<ProfileIdx> =
            tenants.iter().map(|t| state.spec(*t).profile).collect();
        let left = |(i, own): (usize, &ProfileIdx)| {
            let others = profiles.iter().enumerate().filter(|(j, _)| *j != i);
            let extra = others.map(|(_, o)| self.extra(state, gpu_model, *own, *o)).sum::<f64>();
            1.0 / (1.0 + extra)
        };
        let left = profiles.iter().enumerate().map(left).collect();
        Settled { guard: Guard::None, left }
    }

    /// The speeds of these tenants under a guard.
    pub(super) fn under(
        &self,
        state: &State,
        gpu_model: u8,
        tenants: &[JobIdx],
        guard: Guard,
    ) -> Settled {
        let knobs = |job: JobIdx| {
            if state.spec(job).class == Class::Service {
                return Knobs { priority: true, ..Knobs::WHOLE };
            }
            guard.knobs(state.spec(job).max_slowdown.is_some(), Knobs::WHOLE)
        };
        let seated: PerTenant<(JobIdx, Knobs)> = tenants.iter().map(|t| (*t, knobs(*t))).collect();
        let left = seated.iter().map(|own| self.left(state, gpu_model, &seated, *own)).collect();
        Settled { guard, left }
    }

    /// The tenants of a GPU as they are, with the most that can be done for promises.
    pub(super) fn settled_or_squeezed(&self, state: &State, gpu: GpuIdx) -> Settled {
        let gpu = state.gpu(gpu);
        self.settle(state, gpu.gpu_model, &gpu.tenants)
            .unwrap_or_else(|| self.under(state, gpu.gpu_model, &gpu.tenants, Guard::Squeezed))
    }

    /// Speed of a placed job: on its GPUs alone, and what the worst of its rooms leaves of it.
    pub(super) fn speed(&self, state: &State, job: JobIdx) -> f64 {
        let gpus = &state.job(job).gpus;
        let mut left = 1.0_f64;
        for gpu in gpus.iter().filter(|g| state.gpu(**g).tenants.len() > 1) {
            let at = state.gpu(*gpu).tenants.iter().position(|t| *t == job);
            left = left.min(self.settled_or_squeezed(state, *gpu).left[at.unwrap_or(0)]);
        }
        state.solo_speed(job, gpus) * left
    }
}

impl Roommate {
    /// The knobs that a placed job should have, and the roommate because of whom: the strictest
    /// guard of its GPUs.
    pub(super) fn knobs_for(&self, plan: &Plan<'_>, job: JobIdx) -> (Knobs, Option<JobIdx>) {
        let mut guard = Guard::None;
        let (mut with, mut service) = (None, false);
        let mut confined = false;
        for gpu in plan.job(job).gpus.iter().filter(|g| plan.gpu(**g).tenants.len() > 1) {
            let here = self.believed.settled_or_squeezed(plan, *gpu).guard;
            let roommates = || plan.gpu(*gpu).tenants.iter().copied().filter(|t| *t != job);
            service |= roommates().any(|t| plan.spec(t).class == Class::Service);
            let confines = self.services.confine(plan, *gpu);
            if here > guard || (confines && !confined) {
                let matters = |t: &JobIdx| {
                    let spec = plan.spec(*t);
                    spec.max_slowdown.is_some() || spec.class == Class::Service
                };
                with = roommates().find(matters).or_else(|| roommates().next());
            }
            guard = guard.max(here);
            confined |= confines;
        }
        let promised = plan.spec(job).max_slowdown.is_some();
        let mut knobs = guard.knobs(promised, plan.job(job).knobs);
        // Beside a service only the service has priority.
        knobs.priority &= !service;
        if confined {
            let most = knobs.sm_most_permille.min(Guard::CONFINED_PERMILLE);
            knobs.sm_most_permille = kept(most, knobs);
        }
        (knobs, with)
    }
}
