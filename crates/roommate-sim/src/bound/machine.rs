//! The cluster as one machine that can be given to one job at a time, and taken away at any time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A job of the machine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Demand {
    /// Arrival.
    pub(super) at_s: f64,
    /// Seconds of the machine.
    pub(super) size_s: f64,
}

/// Seconds from arrival to completion of each job, with the least remaining work first: no schedule
/// of the machine has a smaller sum.
pub(super) fn completions(demands: &[Demand]) -> Vec<f64> {
    let mut done_s = vec![0.0; demands.len()];
    let ranked_by_remaining = |_: usize, left_s: f64| left_s;
    serve(demands, ranked_by_remaining, |job, _, to_s| done_s[job] = to_s - demands[job].at_s);
    done_s
}

/// Mean time after its arrival at which the work of each job is done, with the smallest job first.
/// The sum is `∫ (t − arrival) · rate ÷ size dt` over all jobs, and it is least if at any time the
/// machine serves the job for which `1 ÷ size` is largest.
pub(super) fn busy_times(demands: &[Demand]) -> Vec<f64> {
    let mut mean_s = vec![0.0; demands.len()];
    let ranked_by_size = |job: usize, _: f64| demands[job].size_s;
    serve(demands, ranked_by_size, |job, from_s, to_s| {
        let Demand { at_s, size_s } = demands[job];
        mean_s[job] += (f64::midpoint(from_s, to_s) - at_s) * (to_s - from_s) / size_s;
    });
    mean_s
}

/// Serves the job of least rank at any time; `served` is told of each interval. Jobs that need
/// nothing are left out.
fn serve(
    demands: &[Demand],
    rank: impl Fn(usize, f64) -> f64,
    mut served: impl FnMut(usize, f64, f64),
) {
    // Floats that are not negative have the order of their bits.
    let bits = |job: usize, left_s: f64| rank(job, left_s.max(0.0)).to_bits();
    let mut left_s: Vec<f64> = demands.iter().map(|d| d.size_s).collect();
    let mut order: Vec<usize> = (0..demands.len()).filter(|i| left_s[*i] > 0.0).collect();
    order.sort_by(|a, b| demands[*a].at_s.total_cmp(&demands[*b].at_s));
    let mut arrivals = order.into_iter().peekable();
    let mut waiting: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    let mut now_s = 0.0;
    loop {
        let Some(Reverse((_, job))) = waiting.pop() else {
            let Some(first) = arrivals.next() else { return };
            now_s = demands[first].at_s.max(now_s);
            waiting.push(Reverse((bits(first, left_s[first]), first)));
            continue;
        };
        let end_s = now_s + left_s[job];
        let next = arrivals.next_if(|next| demands[*next].at_s < end_s);
        let to_s = next.map_or(end_s, |next| demands[next].at_s.max(now_s));
        served(job, now_s, to_s);
        if let Some(next) = next {
            left_s[job] -= to_s - now_s;
            waiting.push(Reverse((bits(job, left_s[job]), job)));
            waiting.push(Reverse((bits(next, left_s[next]), next)));
        }
        now_s = to_s;
    }
}
