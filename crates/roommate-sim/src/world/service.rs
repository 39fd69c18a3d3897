//! Services among the tenants of a simulated world: what they answer with, and what others feel of them.

use super::World;
use crate::serving::Services;
use roommate_core::idx::{GpuIdx, Idx, JobIdx};
use roommate_core::throttle;
use roommate_core::time::Time;
use smallvec::SmallVec;

impl World {
    /// A service answers from now on, under the conditions that it has now.
    pub(super) fn serve(&mut self, now: Time, job: JobIdx) {
        let Some(slot) = self.live[job.usize()].slot else { return };
        let state = self.engine.state();
        let knobs = state.job(job).knobs;
        let reference = state.profile(job).serving.map_or(1, |s| s.batch);
        let batch = if knobs.batch == 0 { reference } else { knobs.batch };
        let gpus = &self.live[job.usize()].gpus;
        let alone = state.alone_step_s(job, gpus);
        let times = Services::sizes(batch).map(|n| alone / self.batch_speed(now, job, n));
        let times: SmallVec<[f64; 16]> = times.collect();
        let busy = self.services.up(now, slot, batch, times.into_iter());
        self.feel(job, busy);
    }

    /// Speed of a service where it is now with batches of this size; the slowest GPU sets the pace.
    pub(super) fn batch_speed(&self, now: Time, job: JobIdx, batch: u32) -> f64 {
        let state = self.engine.state();
        let held = |t: JobIdx| self.live[t.usize()].held_until > now;
        let on = |gpu: &GpuIdx| {
            let mut tenants = throttle::tenants(&*self.truth, state, *gpu, &held);
            let who = tenants.iter().position(|(t, _)| *t == job);
            let who = who.expect("a job is a tenant of its GPUs");
            tenants[who].1.batch = batch;
            throttle::speed(&*self.truth, state, state.gpu(*gpu).kind, &tenants, who)
        };
        self.live[job.usize()].gpus.iter().map(on).fold(f64::INFINITY, f64::min)
    }

    /// Roommates of a service feel how busy it is.
    pub(super) fn feel(&mut self, job: JobIdx, busy: f64) {
        let live = &mut self.live[job.usize()];
        if live.busy != busy {
            live.busy = busy;
            self.truth.loaded(job, busy);
            let gpus = live.gpus.clone();
            self.crowd(job, &gpus);
        }
    }
}
