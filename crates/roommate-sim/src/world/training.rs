//! What batch size, gradient noise and memory make of training in a simulated world.

use super::World;
use roommate_core::goodput::{self, Noise, Training};
use roommate_core::idx::{Idx, JobIdx};
use roommate_core::time::Time;
use roommate_core::why::Why;

impl World {
    pub(super) fn training(&self, job: JobIdx) -> Option<&Training> {
        self.engine.state().profile(job).training.as_ref()
    }

    /// Steps of its own batch size that a step of the job really counts for.
    pub(super) fn worth(&self, job: JobIdx) -> f64 {
        let Some(training) = self.training(job) else { return 1.0 };
        training.worth(self.engine.state().job(job).knobs, self.live[job.usize()].noise_scale)
    }

    /// The noise of its gradients where it goes on from.
    pub(super) fn set_noise(&mut self, job: JobIdx) {
        let Some(noise) = self.training(job).map(|t| t.noise) else { return };
        let live = &mut self.live[job.usize()];
        let stage = noise.stage(live.meter.done / live.work);
        live.noise_scale = noise.at(stage);
        live.noise_until = noise_until(stage, live.work);
    }

    pub(super) fn next_noise(&mut self, now: Time, job: JobIdx) {
        let Some(noise) = self.training(job).map(|t| t.noise) else { return };
        let live = &mut self.live[job.usize()];
        // By the boundary that was reached: the meter may be a rounding error before it.
        let part = live.noise_until / live.work + 0.5 / f64::from(Noise::STAGES);
        let stage = noise.stage(part);
        live.noise_scale = noise.at(stage);
        live.noise_until = noise_until(stage, live.work);
        let (_, pace) = self.pace(now, job);
        self.live[job.usize()].meter.set_step(now, pace);
        self.arm_job(job);
        self.report_pace(now, job);
    }

    /// Notes a job that runs out of GPU memory with its present knobs.
    pub(super) fn check_memory(&mut self, job: JobIdx) {
        let state = self.engine.state();
        let is_there = |t: JobIdx| self.running.contains(t) && !self.starved.contains(&t);
        if self.training(job).is_some() && goodput::is_out_of_memory(state, job, &is_there) {
            self.starved.push(job);
        }
    }

    /// Jobs that ran out of memory fail.
    pub(super) fn fail_starved(&mut self, now: Time) {
        while let Some(job) = self.starved.pop() {
            // One that was stopped meanwhile needs nothing.
            if !self.live[job.usize()].gpus.is_empty() {
                self.fail(now, job, Why::OutOfMemory);
            }
        }
    }
}

/// Steps of a job with so much work at which a stage of its noise ends.
fn noise_until(stage: u32, work: f64) -> f64 {
    if stage + 1 >= Noise::STAGES {
        return f64::INFINITY;
    }
    work * f64::from(stage + 1) / f64::from(Noise::STAGES)
}
