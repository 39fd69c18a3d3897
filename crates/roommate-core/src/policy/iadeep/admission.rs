//! Co-locate or wait: whether a job should join others on a GPU now, or wait for the next place that comes free.
//!
//! Both futures are played out with what is predicted of everybody's degradation. Tenants of a room run at 1/PD
//! of their speed alone; when one ends, the others go on with the PD of those who are left. The rule compares
//! the sums of all completion times:
//!
//! ```text
//! now   = Σ finish(this room, newcomer from 0)  + Σ finish(next room, without it)
//! later = Σ finish(this room, without it)       + Σ finish(next room, newcomer once its first tenant has left)
//! gain  = later − now + behind · extra / capacity
//! ```
//!
//! The last term is for those who wait behind the newcomer: while it is co-located, the room does the work of U' = Σ 1/PD
//! seconds in a second instead of U. Over the newcomer's stay of τ seconds that is extra = (U' − U) · τ seconds of
//! work alone that the queue no longer has to wait for; spread over the cluster's capacity (the sum of U over all
//! rooms) each of those behind starts extra/capacity earlier. A room that thrashes (U' < U) makes it negative.
//!
//! The newcomer joins if the gain is positive.

use smallvec::SmallVec;

/// Jobs on a GPU, and what is predicted of them together.
pub(crate) struct DeviceTenants<'a> {
    /// Seconds of work alone that each tenant has left; the newcomer is the last of them.
    pub(crate) left_s: SmallVec<[f64; 5]>,
    /// Degradation of one of them beside those of a mask (which contains it).
    pub(crate) pd: &'a dyn Fn(u32, usize) -> f64,
}

/// Nobody is expected to run for longer: a year.
const LONGEST_S: f64 = 3.2e7;

/// When somebody who is not there yet comes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Newcomer {
    Now,
    /// Once the first of the others has left.
    Late,
    Never,
}

/// What came of a room.
struct Played {
    /// Sum of all completion times.
    total_s: f64,
    /// When the newcomer ended.
    newcomer_s: f64,
}

impl DeviceTenants<'_> {
    fn newcomer(&self) -> usize {
        self.left_s.len() - 1
    }

    /// Everybody at work, in seconds of work per second.
    fn speed(&self, mask: u32) -> f64 {
        let there = (0..self.left_s.len()).filter(|i| mask >> i & 1 == 1);
        there.map(|i| 1.0 / (self.pd)(mask, i).max(1e-6)).sum()
    }

    fn tenants(&self) -> u32 {
        (1 << self.newcomer()) - 1
    }

    /// Plays the room to its end.
    fn play(&self, comes: Newcomer) -> Played {
        let own = self.newcomer();
        let sane = |s: &f64| if s.is_finite() { s.clamp(0.0, LONGEST_S) } else { LONGEST_S };
        let mut left: SmallVec<[f64; 5]> = self.left_s.iter().map(sane).collect();
        let mut there = self.tenants();
        if comes == Newcomer::Now || (comes == Newcomer::Late && there == 0) {
            there |= 1 << own;
        }
        let (mut now, mut played) = (0.0, Played { total_s: 0.0, newcomer_s: 0.0 });
        let mut waits = comes == Newcomer::Late && there >> own & 1 == 0;
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
            played.total_s += now;
            if ended == own {
                played.newcomer_s = now;
            }
            if std::mem::take(&mut waits) {
                there |= 1 << own;
            }
        }
        played
    }
}

/// How many seconds all jobs together gain if the newcomer joins `here` now instead of waiting for the first
/// tenant of `next` to leave; `None` for `next` if that is the same room, or there is no other.
///
/// `behind` jobs wait behind it, and the whole cluster does the work of `capacity` GPUs.
pub(crate) fn gain_s(
    here: &DeviceTenants<'_>,
    next: Option<&DeviceTenants<'_>>,
    behind: usize,
    capacity: f64,
) -> f64 {
    let now = here.play(Newcomer::Now);
    let (with, without) = match next {
        None => (here.play(Newcomer::Late).total_s, 0.0),
        Some(next) => (
            here.play(Newcomer::Never).total_s + next.play(Newcomer::Late).total_s,
            next.play(Newcomer::Never).total_s,
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

    /// Jobs that disturb each other by pairs.
    struct World {
        work: Vec<f64>,
        harm: Vec<Vec<f64>>,
    }

    /// Whether the next job may join those who are there, or wait, or both.
    type Choose<'a> = &'a mut dyn FnMut(&World, &[f64], &[usize], usize) -> Vec<bool>;

    impl World {
        fn new(rng: &mut Rng, jobs: usize, harm: f64) -> Self {
            let work = (0..jobs).map(|_| 1.0 + 20.0 * rng.unit()).collect();
            let row = |rng: &mut Rng| (0..jobs).map(|_| harm * 2.0 * rng.unit()).collect();
            Self { work, harm: (0..jobs).map(|_| row(rng)).collect() }
        }

        fn pd(&self, there: &[usize], who: usize) -> f64 {
            let others = there.iter().filter(|o| **o != who);
            1.0 + others.map(|o| self.harm[who][*o]).sum::<f64>()
        }

        fn gain(&self, left: &[f64], there: &[usize], job: usize, behind: usize) -> f64 {
            let all: Vec<usize> = there.iter().copied().chain([job]).collect();
            let pd = |mask: u32, who: usize| {
                let members = (0..all.len()).filter(|i| mask >> i & 1 == 1).map(|i| all[i]);
                self.pd(&members.collect::<Vec<_>>(), all[who])
            };
            let left_s = all.iter().map(|j| left[*j]).collect();
            let room = DeviceTenants { left_s, pd: &pd };
            gain_s(&room, None, behind, room.speed(room.tenants()))
        }

        /// One GPU, jobs in the order of their numbers, at most three at once: the sum of completion times if
        /// `choose` says at each chance whether the next joins those who are there.
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
    fn it_is_near_the_best_of_all_choices_and_better_than_always_or_never() {
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
        assert!(ours < 1.015, "{ours} of the best on average; always {always}, never {never}");
        assert!(ours < always - 0.02 && ours < never - 0.02, "{ours} {always} {never}");
        assert!(worst < 1.3, "{worst}");
    }

    #[test]
    fn harmless_roommates_join_and_thrashing_ones_wait() {
        let room = |pd: f64| {
            let of = move |mask: u32, _: usize| if mask.count_ones() > 1 { pd } else { 1.0 };
            let left_s = SmallVec::from_slice(&[10.0, 10.0]);
            gain_s(&DeviceTenants { left_s, pd: &of }, None, 0, 1.0)
        };
        // Both at once, 10 s each, instead of one after the other: 10 + 10 against 10 + 20.
        assert!((room(1.0) - 10.0).abs() < 1e-9);
        // Twice as long each is worse: 20 + 20 against 10 + 20.
        assert!((room(2.0) + 10.0).abs() < 1e-9);
        assert!(room(1.4) > 0.0 && room(1.6) < 0.0);
    }

    #[test]
    fn a_room_that_comes_free_soon_is_waited_for() {
        let of = |mask: u32, _: usize| if mask.count_ones() > 1 { 1.4 } else { 1.0 };
        let room = |left: &[f64]| DeviceTenants { left_s: SmallVec::from_slice(left), pd: &of };
        let here = room(&[100.0, 100.0]);
        let gain = |free_s: f64| gain_s(&here, Some(&room(&[free_s, 100.0])), 0, 2.0);
        assert!(gain(1.0) < 0.0 && gain(99.0) > 0.0, "{} {}", gain(1.0), gain(99.0));
        // With many behind it, a room that does more work is taken earlier.
        let behind = |n: usize| gain_s(&here, Some(&room(&[20.0, 100.0])), n, 2.0);
        assert!(behind(0) < 0.0 && behind(10) > 0.0, "{} {}", behind(0), behind(10));
    }
}
