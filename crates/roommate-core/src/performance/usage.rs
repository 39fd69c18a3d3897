//! What the GPU's counters showed of each profile: learned once from samples, for all policies.

use crate::event::Sample;

/// Counters of one profile so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// Busy shares of the multiprocessors and of the memory bandwidth in the last sample.
    pub last: Option<[f64; 2]>,
    /// The same of samples from jobs that shared none of their GPUs.
    pub solo: SoloUsage,
}

/// Counters of a profile while its jobs had their GPUs to themselves.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SoloUsage {
    /// Samples that count in mean and maximum, at most [`SoloUsage::ENOUGH`].
    pub samples: u32,
    sm_sum: f64,
    /// Largest busy share of the multiprocessors.
    pub sm_max: f64,
    /// Busy share of the multiprocessors in the last sample.
    pub sm_last: f64,
    /// Largest GPU memory, MiB.
    pub mem_mib: u32,
}

impl SoloUsage {
    /// Samples after which a profile counts as known: more would only move the mean by noise.
    pub const ENOUGH: u32 = 16;

    /// Mean busy share of the multiprocessors; `None` before the first sample.
    pub fn sm_mean(&self) -> Option<f64> {
        (self.samples > 0).then(|| self.sm_sum / f64::from(self.samples))
    }
}

impl Usage {
    /// Takes in a sample; `alone` says whether the job shared none of its GPUs. Samples without
    /// counters change nothing.
    pub fn learn(&mut self, sample: &Sample, alone: bool) {
        let [sm, dram] = [sample.sm_util, sample.dram_util].map(f64::from);
        if sm <= 0.0 {
            return;
        }
        self.last = Some([sm, dram]);
        if !alone {
            return;
        }
        self.solo.sm_last = sm;
        if self.solo.samples < SoloUsage::ENOUGH {
            self.solo.samples += 1;
            self.solo.sm_sum += sm;
            self.solo.sm_max = self.solo.sm_max.max(sm);
            self.solo.mem_mib = self.solo.mem_mib.max(sample.mem_mib);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::number::Number32;

    fn sample(sm_util: f32, mem_mib: u32) -> Sample {
        let [sm_util, dram_util] = [sm_util, 0.25].map(Number32::of);
        Sample { sm_util, dram_util, mem_mib, ..Sample::default() }
    }

    #[test]
    fn shared_samples_say_nothing_of_solo_use() {
        let mut usage = Usage::default();
        usage.learn(&sample(0.5, 10), false);
        assert_eq!(usage.last, Some([0.5, 0.25]));
        assert_eq!(usage.solo.sm_mean(), None);
        usage.learn(&sample(0.25, 20), true);
        assert_eq!((usage.solo.sm_mean(), usage.solo.mem_mib), (Some(0.25), 20));
    }

    #[test]
    fn samples_without_counters_are_ignored() {
        let mut usage = Usage::default();
        for bad in [0.0, -1.0, f32::NAN] {
            usage.learn(&sample(bad, 10), true);
        }
        assert_eq!(usage, Usage::default());
    }

    #[test]
    fn mean_and_maximum_rest_after_enough_samples() {
        let mut usage = Usage::default();
        (0..SoloUsage::ENOUGH).for_each(|_| usage.learn(&sample(0.5, 10), true));
        usage.learn(&sample(1.0, 99), true);
        let SoloUsage { sm_max, sm_last, mem_mib, .. } = usage.solo;
        assert_eq!((usage.solo.sm_mean(), sm_max, sm_last, mem_mib), (Some(0.5), 0.5, 1.0, 10));
    }
}
