//! Services in the world: they answer requests while they run, and their load slows co-located
//! jobs.

use super::World;
use crate::serving::{Answering, Load, Services};
use roommate_core::event::Event;
use roommate_core::idx::{GpuIdx, JobIdx};
use roommate_core::journal::{Observer, StepView};
use roommate_core::knobs::Knobs;
use roommate_core::performance::{effective_speed, throttle};
use roommate_core::time::Time;
use smallvec::SmallVec;

impl World {
    /// Applies due changes of request rates and closes due windows.
    pub(super) fn ring_services(&mut self, now: Time) {
        while let Some((slot, job)) = self.services.change_due(now) {
            self.set_load(job, self.services.load(slot));
        }
        self.services.close_window(now, &mut self.facts);
    }

    /// The service answers from now on with its present batch size and speed.
    pub(super) fn serve(&mut self, now: Time, job: JobIdx) {
        let Some(slot) = self.live[job].slot else { return };
        let state = self.engine.state();
        let knobs = state.job(job).knobs;
        let reference = state.profile(job).serving.map_or(1, |s| s.batch);
        let batch = if knobs.batch == 0 { reference } else { knobs.batch };
        let gpus = &self.live[job].gpus;
        let alone = self.true_step_s(job);
        let times = Services::sizes(batch).map(|n| alone / self.batch_speed(now, job, n));
        let times: SmallVec<[f64; 16]> = times.collect();
        let shares = gpus.iter().any(|g| state.gpu(*g).tenants.len() > 1);
        let behind_gate = self.services.has_gate() && shares;
        let behind: SmallVec<[f64; 16]> = if behind_gate {
            Services::sizes(batch).map(|n| alone / self.speed_alone(job, n)).collect()
        } else {
            SmallVec::new()
        };
        let way = Answering {
            batch,
            fill_us: knobs.fill_us,
            times: &times,
            alone: behind_gate.then_some(&behind[..]),
        };
        let load = self.services.up(now, slot, &way);
        self.set_load(job, load);
    }

    /// Speed of a service with batches of this size while its roommates stand still.
    fn speed_alone(&self, job: JobIdx, batch: u32) -> f64 {
        let state = self.engine.state();
        let knobs = Knobs { batch, ..state.job(job).knobs };
        let on = |gpu: &GpuIdx| {
            let model = state.gpu(*gpu).gpu_model;
            effective_speed::speed(&*self.truth, state, model, &[(job, knobs)], 0)
        };
        self.live[job].gpus.iter().map(on).fold(f64::INFINITY, f64::min)
    }

    /// Share of the time in which no gate of a service on its GPUs is closed for a training job:
    /// services close theirs independently, and one closed gate stops a whole gang.
    pub(super) fn open_share(&self, job: JobIdx) -> f64 {
        if !self.services.has_gate() {
            return 1.0;
        }
        let state = self.engine.state();
        let mut services: SmallVec<[JobIdx; 4]> = SmallVec::new();
        for tenant in self.live[job].gpus.iter().flat_map(|g| &state.gpu(*g).tenants) {
            if *tenant != job && self.live[*tenant].slot.is_some() && !services.contains(tenant) {
                services.push(*tenant);
            }
        }
        services.iter().map(|s| 1.0 - self.live[*s].load.closed).product()
    }

    /// Speed of a service with batches of this size; the slowest of its GPUs determines it.
    pub(super) fn batch_speed(&self, now: Time, job: JobIdx, batch: u32) -> f64 {
        let state = self.engine.state();
        let held = |t: JobIdx| self.live[t].held_until > now;
        let on = |gpu: &GpuIdx| {
            let mut tenants = throttle::tenants(&*self.truth, state, *gpu, &held);
            let who = tenants.iter().position(|(t, _)| *t == job);
            let who = who.expect("a job is a tenant of its GPUs");
            tenants[who].1.batch = batch;
            effective_speed::speed(&*self.truth, state, state.gpu(*gpu).gpu_model, &tenants, who)
        };
        self.live[job].gpus.iter().map(on).fold(f64::INFINITY, f64::min)
    }

    /// Sets the load of a service and marks its co-located jobs.
    pub(super) fn set_load(&mut self, job: JobIdx, load: Load) {
        let live = &mut self.live[job];
        if live.load != load {
            live.load = load;
            self.truth.set_load(job, load.busy);
            let gpus = live.gpus.clone();
            self.crowd(job, &gpus);
        }
    }

    pub(super) fn end_service(&mut self, now: Time, job: JobIdx) {
        let live = &mut self.live[job];
        live.serves = false;
        if let Some(slot) = live.slot {
            self.services.end(now, slot, &mut self.facts);
        }
    }

    /// Services end with the last training job. Where the run ends before that, only their windows
    /// are accounted for.
    pub(super) fn end_services<O: Observer>(&mut self, now: Time, observer: &mut O) {
        self.facts.clear();
        let here: Vec<(u32, JobIdx)> = self.services.here().collect();
        for (slot, _) in here {
            self.services.end(now, slot, &mut self.facts);
        }
        if self.unfinished == 0 {
            let serves = self.live.indices().filter(|j| self.live[*j].serves);
            self.facts.extend(serves.map(Event::Cancelled));
        }
        if !self.facts.is_empty() {
            let step = self.engine.step(now, &self.facts);
            debug_assert!(
                step.contradictions.is_empty(),
                "the simulator reports only possible facts"
            );
            observer.step(&StepView::of(now, &self.facts, &step));
        }
    }
}
