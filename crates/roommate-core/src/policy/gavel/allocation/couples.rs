//! Couples found by trial, as the Gavel paper models Gandiva: pairs of jobs that share GPUs are
//! drawn at random, couples that lose are separated, and all rows get equal fractions of the time.

use crate::policy::gavel::allocation::program::PairSpeed;
use crate::policy::gavel::allocation::{Allocation, ByGpuModel, Market, Pair};
use std::collections::BTreeMap;

/// Draws two different numbers below the argument.
pub(crate) type DrawTwo<'a> = &'a mut dyn FnMut(usize) -> [usize; 2];

/// The couples. A job is identified by a number that grows with its arrival.
#[derive(Clone, Debug)]
pub(crate) struct Couples {
    partner: BTreeMap<u32, u32>,
    /// As in the released code: any two jobs are tried, and they stay together if they gain in the
    /// sum over all GPU models, instead of on each.
    released: bool,
}

impl Couples {
    /// No couples yet.
    pub(crate) fn new(released: bool) -> Self {
        Self { partner: BTreeMap::new(), released }
    }

    /// Equal fractions for couples and single jobs; couples exist only if the jobs need more GPUs
    /// than there are. `jobs` are the numbers of the claims, ascending.
    pub(crate) fn allocate(
        &mut self,
        market: &Market,
        jobs: &[u32],
        speed: PairSpeed<'_>,
        draw: DrawTwo<'_>,
    ) -> Allocation {
        let at = |job: u32| jobs.binary_search(&job).ok();
        let released = self.released;
        self.partner.retain(|job, other| {
            let both = at(*job.min(other)).zip(at(*job.max(other)));
            both.is_some_and(|(a, b)| worth_it(market, [a, b], speed, released))
        });
        let wanted: f64 = market.claims.iter().map(|c| c.gpus).sum();
        if wanted <= market.total() {
            return market.isolated();
        }
        self.form_couples(market, jobs, speed, draw);
        let mut rows: Vec<[usize; 2]> = Vec::new();
        for (i, job) in jobs.iter().enumerate() {
            match self.partner.get(job).and_then(|other| at(*other)) {
                Some(other) if other > i => rows.push([i, other]),
                Some(_) => {}
                None => rows.push([i, i]),
            }
        }
        let none = ByGpuModel::from_elem(0.0, market.gpus.len());
        let mut found =
            Allocation { alone: vec![none; jobs.len()], value: 1.0, ..Allocation::default() };
        for row in &rows {
            let share = market.piece(&market.claims[row[0]], rows.len());
            if row[0] == row[1] {
                found.alone[row[0]] = share;
            } else {
                found.pairs.push(Pair { members: *row, share });
            }
        }
        found
    }

    /// Draws two single jobs, as often as there are single jobs. They become a couple if they have
    /// the same width and are expected to gain.
    fn form_couples(
        &mut self,
        market: &Market,
        jobs: &[u32],
        speed: PairSpeed<'_>,
        draw: DrawTwo<'_>,
    ) {
        let mut single: Vec<usize> =
            (0..jobs.len()).filter(|i| !self.partner.contains_key(&jobs[*i])).collect();
        for _ in 0..single.len() {
            if single.len() < 2 {
                break;
            }
            let [a, b] = draw(single.len()).map(|i| single[i]);
            let promising = self.released || worth_it(market, [a.min(b), a.max(b)], speed, false);
            if market.claims[a].gpus == market.claims[b].gpus && promising {
                single.retain(|i| *i != a && *i != b);
                self.partner.insert(jobs[a], jobs[b]);
                self.partner.insert(jobs[b], jobs[a]);
            }
        }
    }
}

/// Whether two jobs are faster together than in turns; `summed`: over all GPU models together,
/// instead of on each.
fn worth_it(market: &Market, pair: [usize; 2], speed: PairSpeed<'_>, summed: bool) -> bool {
    let [a, b] = pair.map(|m| &market.claims[m]);
    let mut sum = 0.0;
    for gpu_model in 0..market.gpus.len() {
        let usable = a.speed[gpu_model] > 0.0 && b.speed[gpu_model] > 0.0;
        if !usable && !summed {
            continue;
        }
        let [x, y] = speed(pair[0], pair[1], gpu_model);
        if x <= 0.0 || y <= 0.0 {
            return false;
        }
        let here = x / a.speed[gpu_model] + y / b.speed[gpu_model];
        if here < 1.0 && !summed {
            return false;
        }
        sum += here;
    }
    sum >= 1.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::gavel::allocation::testing::{close, market};

    fn first_two(_: usize) -> [usize; 2] {
        [0, 1]
    }

    #[test]
    fn couples_stay_while_they_gain() {
        let m = market(&[1.0], &[&[1.0]; 3]);
        let mut couples = Couples::new(false);
        let good = |_: usize, _: usize, _: usize| [0.6, 0.6];
        let found = couples.allocate(&m, &[0, 1, 2], &good, &mut first_two);
        assert_eq!((found.pairs[0].members, found.pairs[0].share[0]), ([0, 1], 0.5));
        close(&found.alone, &[&[0.0], &[0.0], &[0.5]]);
        // The couple is kept whatever is drawn, until it loses.
        let found = couples.allocate(&m, &[0, 1, 2], &good, &mut |_| [1, 0]);
        assert_eq!(found.pairs[0].members, [0, 1]);
        let bad = |_: usize, _: usize, _: usize| [0.4, 0.4];
        let found = couples.allocate(&m, &[0, 1, 2], &bad, &mut |_| [1, 2]);
        assert!(found.pairs.is_empty());
        close(&found.alone, &[&[1.0 / 3.0]; 3]);
        // The couple was separated, so both jobs can be drawn again after the third has left.
        let mut two = m.clone();
        two.claims.pop();
        let found = couples.allocate(&two, &[0, 1], &good, &mut first_two);
        assert_eq!(found.pairs[0].members, [0, 1]);
    }

    #[test]
    fn couples_need_contention_and_equal_widths() {
        let mut m = market(&[2.0], &[&[1.0]; 2]);
        let good = |_: usize, _: usize, _: usize| [0.9, 0.9];
        let found = Couples::new(false).allocate(&m, &[0, 1], &good, &mut first_two);
        assert!(found.pairs.is_empty());
        close(&found.alone, &[&[1.0], &[1.0]]);
        m.claims[1].gpus = 2.0;
        let found = Couples::new(false).allocate(&m, &[0, 1], &good, &mut first_two);
        assert!(found.pairs.is_empty());
        close(&found.alone, &[&[1.0], &[0.5]]);
    }

    #[test]
    fn released_couples_sum_their_gain_over_gpu_models() {
        // A loss on each GPU model, but not in the sum.
        let m = market(&[1.0, 1.0], &[&[1.0, 1.0]; 3]);
        let pairs = |released: bool, speed: f64| {
            let speed = |_: usize, _: usize, _: usize| [speed; 2];
            let mut couples = Couples::new(released);
            couples.allocate(&m, &[0, 1, 2], &speed, &mut first_two);
            let found = couples.allocate(&m, &[0, 1, 2], &speed, &mut |n| [n - 2, n - 1]);
            found.pairs.iter().map(|p| p.members).collect::<Vec<_>>()
        };
        assert_eq!(pairs(true, 0.3), [[0, 1]]);
        assert_eq!(pairs(true, 0.2), [[1, 2]]);
        assert!(pairs(false, 0.3).is_empty());
    }
}
