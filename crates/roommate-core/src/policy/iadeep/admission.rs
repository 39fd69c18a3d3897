//! Co-locate or wait: whether a job joins the tenants of a GPU now, or waits for the next tenant to
//! leave.
//!
//! Both alternatives are simulated with the predicted degradations. Tenants of a GPU run at 1/PD of
//! their speed alone; when one ends, the remaining tenants continue with the PD of the smaller
//! group. The rule compares the sums of all completion times:
//!
//! ```text
//! now   = Σ finish(this GPU, new job from 0) + Σ finish(next GPU, without it)
//! later = Σ finish(this GPU, without it)     + Σ finish(next GPU, new job after the first end)
//! gain  = later − now + behind · extra / capacity
//! ```
//!
//! The last term is for the jobs that wait behind the new job. While it is co-located, the GPU does
//! U' = Σ 1/PD seconds of work per second instead of U. Over the new job's stay of τ seconds that
//! is extra = (U' − U) · τ seconds of work that the queue no longer has to wait for, and each
//! job behind it starts extra/capacity earlier, where the capacity is the number of GPUs. If the
//! GPU does less work with the new job (U' < U), the term is negative.
//!
//! The new job is co-located if the gain is positive.

use smallvec::SmallVec;

/// Jobs on a GPU and their predicted degradations.
pub(crate) struct DeviceTenants<'a> {
    /// Seconds of work alone that each tenant has left; the new job is the last.
    pub(crate) left_s: SmallVec<[f64; 5]>,
    /// Degradation of the job with this index beside the jobs of a bit mask, which contains it.
    pub(crate) pd: &'a dyn Fn(u32, usize) -> f64,
}

/// No job is expected to run longer than a year.
const LONGEST_S: f64 = 3.2e7;

/// When the new job joins the GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Newcomer {
    Now,
    /// After the first tenant has left.
    Late,
    Never,
}

/// Result of a simulated GPU.
struct Simulated {
    /// Sum of all completion times.
    total_s: f64,
    /// When the newcomer ended.
    newcomer_s: f64,
}

impl DeviceTenants<'_> {
    fn newcomer(&self) -> usize {
        self.left_s.len() - 1
    }

    /// Speed of all jobs of a mask together, in seconds of work per second.
    fn speed(&self, mask: u32) -> f64 {
        let there = (0..self.left_s.len()).filter(|i| mask >> i & 1 == 1);
        there.map(|i| 1.0 / (self.pd)(mask, i).max(1e-6)).sum()
    }

    fn tenants(&self) -> u32 {
        (1 << self.newcomer()) - 1
    }

    /// Simulates the GPU until all its jobs have ended.
    fn simulate(&self, joins: Newcomer) -> Simulated {
        let own = self.newcomer();
        let sane = |s: &f64| if s.is_finite() { s.clamp(0.0, LONGEST_S) } else { LONGEST_S };
        let mut left: SmallVec<[f64; 5]> = self.left_s.iter().map(sane).collect();
        let mut there = self.tenants();
        if joins == Newcomer::Now || (joins == Newcomer::Late && there == 0) {
            there |= 1 << own;
        }
        let (mut now, mut simulated) = (0.0, Simulated { total_s: 0.0, newcomer_s: 0.0 });
        let mut waits = joins == Newcomer::Late && there >> own & 1 == 0;
        while there != 0 {
            let members = (0..left.len()).filter(|i| there >> i & 1 == 1);
            let paces: SmallVec<[(usize, f64); 5]> =
                members.map(|i| (i, (self.pd)(there, i).clamp(1e-3, 1e6))).collect();
            let ends = |(i, pd): &(usize, f64)| left[*i] * pd;
            let first = paces.iter().min_by(|a, b| ends(a).total_cmp(&ends(b)));
            let Some(&(ended, pd)) = first else { break };
            let next = left[ended] * pd;
            now += next;
            for (i, pd) in paces {
                left[i] = (left[i] - next / pd).max(0.0);
            }
            there &= !(1 << ended);
            simulated.total_s += now;
            if ended == own {
                simulated.newcomer_s = now;
            }
            if std::mem::take(&mut waits) {
                there |= 1 << own;
            }
        }
        simulated
    }
}

/// Completion time in seconds that all jobs together gain if the new job joins `here` now instead
/// of waiting for the first tenant of `next` to leave. `next` is `None` if it is the same GPU, or
/// if there is no other.
///
/// `behind` jobs wait behind it, and the cluster does `capacity` seconds of work per second.
pub(crate) fn gain_s(
    here: &DeviceTenants<'_>,
    next: Option<&DeviceTenants<'_>>,
    behind: usize,
    capacity: f64,
) -> f64 {
    let now = here.simulate(Newcomer::Now);
    let (with, without) = match next {
        None => (here.simulate(Newcomer::Late).total_s, 0.0),
        Some(next) => (
            here.simulate(Newcomer::Never).total_s + next.simulate(Newcomer::Late).total_s,
            next.simulate(Newcomer::Never).total_s,
        ),
    };
    let tenants = here.tenants();
    let more = here.speed(tenants | 1 << here.newcomer()) - here.speed(tenants);
    let extra = more * now.newcomer_s;
    with - (now.total_s + without) + behind as f64 * extra / capacity.max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::rng::Rng;

    /// Jobs with an interference for each pair.
    struct World {
        work: Vec<f64>,
        harm: Vec<Vec<f64>>,
    }

    /// Options for the next job: join the running jobs (true), wait (false), or both.
    type Choose<'a> = &'a mut dyn FnMut(&World, &[f64], &[usize], usize) -> Vec<bool>;

    impl World {
        fn new(rng: &mut Rng, jobs: usize, harm: f64) -> Self {
            let work = (0..jobs).map(|_| 1.0 + 20.0 * rng.unit()).collect();
            let row = |rng: &mut Rng| (0..jobs).map(|_| harm * 2.0 * rng.unit()).collect();
            Self { work, harm: (0..jobs).map(|_| row(rng)).collect() }
        }

        fn pd(&self, there: &[usize], job: usize) -> f64 {
            let others = there.iter().filter(|o| **o != job);
            1.0 + others.map(|o| self.harm[job][*o]).sum::<f64>()
        }

        fn gain(&self, left: &[f64], there: &[usize], job: usize, behind: usize) -> f64 {
            let all: Vec<usize> = there.iter().copied().chain([job]).collect();
            let pd = |mask: u32, k: usize| {
                let members = (0..all.len()).filter(|i| mask >> i & 1 == 1).map(|i| all[i]);
                self.pd(&members.collect::<Vec<_>>(), all[k])
            };
            let left_s = all.iter().map(|j| left[*j]).collect();
            let gpu = DeviceTenants { left_s, pd: &pd };
            gain_s(&gpu, None, behind, gpu.speed(gpu.tenants()))
        }

        /// Sum of completion times on one GPU, for jobs in the order of their numbers and at most
        /// three at once, if `choose` returns the options of the next job at each opportunity.
        fn play(
            &self,
            left: &[f64],
            there: &[usize],
            next: usize,
            now: f64,
            choose: Choose<'_>,
        ) -> f64 {
            if next == self.work.len() && there.is_empty() {
                return 0.0;
            }
            let options = if next == self.work.len() || there.len() == 3 {
                vec![false]
            } else if there.is_empty() {
                vec![true]
            } else {
                choose(self, left, there, next)
            };
            let mut best = f64::INFINITY;
            for joins in options {
                let (mut left, mut there) = (left.to_vec(), there.to_vec());
                let total = if joins {
                    there.push(next);
                    self.play(&left, &there, next + 1, now, choose)
                } else {
                    let paces: Vec<f64> = there.iter().map(|j| self.pd(&there, *j)).collect();
                    let ends = there.iter().zip(&paces).map(|(j, p)| left[*j] * p);
                    let step = ends.fold(f64::INFINITY, f64::min);
                    for (j, p) in there.iter().zip(&paces) {
                        left[*j] -= step / p;
                    }
                    let before = there.len();
                    there.retain(|j| left[*j] > 1e-9);
                    let ended = (before - there.len()) as f64;
                    ended * (now + step) + self.play(&left, &there, next, now + step, choose)
                };
                best = best.min(total);
            }
            best
        }

        fn total(&self, choose: Choose<'_>) -> f64 {
            self.play(&self.work, &[], 0, 0.0, choose)
        }
    }

    #[test]
    fn the_rule_is_close_to_the_best_of_all_choices() {
        let mut rng = Rng::stream(5, 103);
        let mut sums = [0.0; 4];
        let mut worst: f64 = 1.0;
        for round in 0..200 {
            let harm = [0.1, 0.3, 0.6, 1.0, 1.6][round % 5];
            let jobs = 3 + rng.below(4) as usize;
            let world = World::new(&mut rng, jobs, harm);
            let best = world.total(&mut |_, _, _, _| vec![true, false]);
            let ours = world.total(&mut |w, left, there, next| {
                vec![w.gain(left, there, next, w.work.len() - next - 1) > 0.0]
            });
            let always = world.total(&mut |_, _, _, _| vec![true]);
            let never = world.total(&mut |_, _, _, _| vec![false]);
            worst = worst.max(ours / best);
            for (sum, total) in sums.iter_mut().zip([best, ours, always, never]) {
                *sum += total / best / 200.0;
            }
        }
        let [_, ours, always, never] = sums;
        assert!(ours < 1.015, "{ours} times the best on average; always {always}, never {never}");
        assert!(ours < always - 0.02 && ours < never - 0.02, "{ours} {always} {never}");
        assert!(worst < 1.3, "{worst}");
    }

    #[test]
    fn harmless_roommates_join_and_thrashing_ones_wait() {
        let gain = |pd: f64| {
            let of = move |mask: u32, _: usize| if mask.count_ones() > 1 { pd } else { 1.0 };
            let left_s = SmallVec::from_slice(&[10.0, 10.0]);
            gain_s(&DeviceTenants { left_s, pd: &of }, None, 0, 1.0)
        };
        // Both at once, 10 s each, instead of one after the other: 10 + 10 against 10 + 20.
        assert!((gain(1.0) - 10.0).abs() < 1e-9);
        // If each takes twice as long, that is worse: 20 + 20 against 10 + 20.
        assert!((gain(2.0) + 10.0).abs() < 1e-9);
        assert!(gain(1.4) > 0.0 && gain(1.6) < 0.0);
    }

    #[test]
    fn a_job_waits_for_a_gpu_that_is_free_soon() {
        let of = |mask: u32, _: usize| if mask.count_ones() > 1 { 1.4 } else { 1.0 };
        let gpu = |left: &[f64]| DeviceTenants { left_s: SmallVec::from_slice(left), pd: &of };
        let here = gpu(&[100.0, 100.0]);
        let gain = |free_s: f64| gain_s(&here, Some(&gpu(&[free_s, 100.0])), 0, 2.0);
        assert!(gain(1.0) < 0.0 && gain(99.0) > 0.0, "{} {}", gain(1.0), gain(99.0));
        // With many jobs behind it, a GPU that does more work is joined earlier.
        let behind = |n: usize| gain_s(&here, Some(&gpu(&[20.0, 100.0])), n, 2.0);
        assert!(behind(0) < 0.0 && behind(10) > 0.0, "{} {}", behind(0), behind(10));
    }
}
