//! The queue of a service, simulated request by request. A batch begins when it is full or when its
//! oldest request has waited for the time-out; one batch runs at a time.
//!
//! The simulation advances from batch to batch. Requests are drawn only when a batch takes them, so
//! a growing queue needs no memory.

use super::requests::Source;
use std::collections::VecDeque;

/// How a service forms batches, and its SLO.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rules {
    /// Largest number of requests of a batch.
    pub(super) batch: u32,
    /// Longest time that a request waits for a full batch while the GPU is idle.
    pub(super) timeout_s: f64,
    /// Latency above which a request is late.
    pub(super) slo_s: f64,
    /// The gate on the kernels of roommates, if there is one.
    pub(super) gate: Option<Gate>,
}

/// A gate that a service closes for its roommates while a request would otherwise be late.
///
/// It is closed for a batch if, with all batches of the queue beside its roommates, a request of
/// the queue would miss the objective, or if one that comes right behind this batch could not make
/// it any more even behind the closed gate. It stays closed until what waits fits into one batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Gate {
    /// Batch times while roommates stand still.
    pub(super) alone: Steps,
    /// The latency that it defends.
    pub(super) objective_s: f64,
}

/// Batch times beside roommates vary; the gate reckons with this multiple of the mean.
const UPPER: f64 = 1.15;
/// Time until the kernels that roommates launched before the gate closed are through: 0.4 to 1.4 ms
/// measured with 4 to 16 launches ahead, up to 2.3 ms with 64.
const DRAIN_S: f64 = 0.0008;

impl Rules {
    /// Time after which a client gives up: the request counts as late and is not processed.
    pub(super) fn patience_s(&self) -> f64 {
        let slo_s = if self.slo_s.is_finite() { self.slo_s } else { 1.0 };
        (PATIENCE * slo_s).max(PATIENCE * self.timeout_s)
    }
}

/// A client gives up after this multiple of the SLO.
const PATIENCE: f64 = 10.0;
/// Largest number of batch sizes with a known batch time; between them it is interpolated linearly.
pub(super) const KNOTS: usize = 14;

/// Seconds of a batch by its size: at 1, 2, 4, … and at the largest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Steps {
    pub(super) knots: [f64; KNOTS],
    pub(super) most: u32,
}

impl Steps {
    /// The sizes at which [`Self::new`] needs the batch time.
    pub(super) fn sizes(most: u32) -> impl Iterator<Item = u32> {
        let most = most.clamp(1, 1 << (KNOTS - 2));
        (0..KNOTS as u32).map(|k| 1 << k).take_while(move |n| *n < most).chain([most])
    }

    /// From the times at [`Self::sizes`]. A larger batch that is faster than a smaller one is a
    /// measurement error: both get their mean (isotonic regression).
    pub(super) fn new(most: u32, times: impl Iterator<Item = f64>) -> Self {
        let mut pools: Vec<(f64, usize)> = Vec::with_capacity(KNOTS);
        for time in times {
            let mut pool = (time, 1);
            while let Some(last) = pools.pop_if(|last| last.0 > pool.0) {
                let n = last.1 + pool.1;
                pool = ((last.0 * last.1 as f64 + pool.0 * pool.1 as f64) / n as f64, n);
            }
            pools.push(pool);
        }
        let mut knots = [f64::INFINITY; KNOTS];
        let smooth = pools.into_iter().flat_map(|(time, n)| std::iter::repeat_n(time, n));
        knots.iter_mut().zip(smooth).for_each(|(knot, time)| *knot = time);
        Self { knots, most: most.clamp(1, 1 << (KNOTS - 2)) }
    }

    /// Seconds of a batch of `n` requests.
    pub(super) fn at(&self, n: u32) -> f64 {
        let n = n.clamp(1, self.most);
        let k = n.ilog2();
        let low = 1 << k;
        if n == low {
            return self.knots[k as usize];
        }
        let high = (low << 1).min(self.most);
        let part = f64::from(n - low) / f64::from(high - low);
        let (a, b) = (self.knots[k as usize], self.knots[k as usize + 1]);
        a + part * (b - a)
    }
}

/// Buckets per doubling of latency.
const FINE: usize = 64;
/// Number of doublings, from 2⁻¹⁴ s (61 µs) to 2¹⁰ s.
const DOUBLINGS: usize = 24;
/// Low bits of a double that do not affect its bucket.
const SHIFT: u32 = 52 - FINE.ilog2();
/// The bucket of 2⁻¹⁴ s among those of all doubles.
const FIRST: u64 = (1023 - 14) << FINE.ilog2();

/// Histogram of request latencies.
#[derive(Clone, Debug)]
pub(super) struct Tally {
    /// By bucket; with 64 buckets per doubling a bucket is 0.8 to 1.6 % wide.
    counts: Box<[u32]>,
    pub(super) requests: u64,
    pub(super) late: u64,
    /// Seconds in which a batch ran.
    pub(super) busy_s: f64,
    /// Seconds in which the gate was closed.
    pub(super) closed_s: f64,
    pub(super) batches: u64,
}

impl Default for Tally {
    fn default() -> Self {
        let counts = vec![0; FINE * DOUBLINGS].into_boxed_slice();
        Self { counts, requests: 0, late: 0, busy_s: 0.0, closed_s: 0.0, batches: 0 }
    }
}

impl Tally {
    pub(super) fn clear(&mut self) {
        self.counts.fill(0);
        (self.requests, self.late, self.batches) = (0, 0, 0);
        (self.busy_s, self.closed_s) = (0.0, 0.0);
    }

    fn count(&mut self, latency_s: f64, slo_s: f64) {
        let bucket = (latency_s.to_bits() >> SHIFT).saturating_sub(FIRST) as usize;
        self.counts[bucket.min(FINE * DOUBLINGS - 1)] += 1;
        self.requests += 1;
        self.late += u64::from(latency_s > slo_s);
    }

    /// Counts a request that is never answered.
    pub(super) fn lose(&mut self, patience_s: f64) {
        self.count(patience_s, 0.0);
    }

    /// The latency at a quantile; within 1 %, because it is read from buckets.
    pub(super) fn quantile_s(&self, q: f64) -> f64 {
        let rank = (q * self.requests as f64) as u64;
        let mut before = 0;
        for (bucket, n) in self.counts.iter().enumerate() {
            let n = u64::from(*n);
            if before + n > rank {
                let edge = |b: usize| f64::from_bits((b as u64 + FIRST) << SHIFT);
                let part = (rank - before) as f64 + 0.5;
                return edge(bucket) + part / n as f64 * (edge(bucket + 1) - edge(bucket));
            }
            before += n;
        }
        0.0
    }
}

/// A service with its queue of arrival times.
#[derive(Clone, Debug, Default)]
pub(super) struct Server {
    waiting: VecDeque<f64>,
    free_at: f64,
    /// Until when the gate was closed last.
    closed_until: f64,
}

impl Server {
    /// Runs all batches that begin before `until`.
    pub(super) fn serve(
        &mut self,
        source: &mut Source,
        until: f64,
        rules: &Rules,
        steps: &Steps,
        tally: &mut Tally,
    ) {
        let most = rules.batch.min(steps.most).max(1) as usize;
        let patience_s = rules.patience_s();
        loop {
            let first = match self.waiting.front() {
                Some(first) => *first,
                None if source.peek() < until => {
                    self.waiting.push_back(source.take());
                    continue;
                }
                None => return,
            };
            let latest = self.free_at.max(first + rules.timeout_s);
            while self.waiting.len() < most && source.peek() <= latest && source.peek() < until {
                self.waiting.push_back(source.take());
            }
            let filled = self.waiting.len() >= most;
            let begin = if filled { self.free_at.max(self.waiting[most - 1]) } else { latest };
            if begin >= until {
                return;
            }
            if begin - first > patience_s {
                self.waiting.pop_front();
                tally.lose(patience_s);
                continue;
            }
            let n = self.waiting.len().min(most);
            let mut took = steps.at(n as u32);
            if let Some(gate) = &rules.gate {
                while source.peek() <= begin && source.peek() < until {
                    self.waiting.push_back(source.take());
                }
                let was_closed = self.closed_until >= begin;
                if self.must_close(gate, begin, most, steps, was_closed) {
                    let drain_s = if was_closed { 0.0 } else { DRAIN_S };
                    // A batch never waits longer for the gate than it would beside roommates.
                    took = (gate.alone.at(n as u32) + drain_s).min(took);
                    self.closed_until = begin + took;
                    tally.closed_s += took;
                }
            }
            for arrived in self.waiting.drain(..n) {
                tally.count(begin + took - arrived, rules.slo_s);
            }
            self.free_at = begin + took;
            tally.busy_s += took;
            tally.batches += 1;
        }
    }

    /// Whether the gate has to be closed for the batch that begins now.
    fn must_close(&self, gate: &Gate, now: f64, most: usize, beside: &Steps, was: bool) -> bool {
        let backlog = self.waiting.len() > most;
        if was && backlog {
            return true;
        }
        let left_s = |arrived: f64| gate.objective_s - (now - arrived);
        let mut needs_s = 0.0;
        for (k, first) in self.waiting.iter().enumerate().step_by(most) {
            needs_s += UPPER * beside.at((self.waiting.len() - k).min(most) as u32);
            if needs_s > left_s(*first) {
                return true;
            }
        }
        let next_s = gate.alone.at(most as u32) + DRAIN_S;
        UPPER * beside.at(self.waiting.len().min(most) as u32) + next_s > gate.objective_s
    }

    /// The service is down until `until`: all waiting and arriving requests are lost.
    pub(super) fn lose(
        &mut self,
        source: &mut Source,
        until: f64,
        rules: &Rules,
        tally: &mut Tally,
    ) {
        while source.peek() < until {
            self.waiting.push_back(source.take());
            self.waiting.drain(..).for_each(|_| tally.lose(rules.patience_s()));
        }
        self.waiting.drain(..).for_each(|_| tally.lose(rules.patience_s()));
        self.free_at = until;
    }
}

#[cfg(test)]
mod tests {
    use super::super::requests::Requests;
    use super::*;
    use roommate_core::math::rng::Rng;
    use std::sync::Arc;

    fn steps(most: u32, fixed_s: f64, each_s: f64) -> Steps {
        Steps::new(most, Steps::sizes(most).map(|n| fixed_s + each_s * f64::from(n)))
    }

    fn at(times: &[f64]) -> Source {
        let requests = Requests::Times { times: Arc::from(times), period_s: 1e9 };
        Source::new(&requests, 0.0, 0.0, Rng::new(0))
    }

    #[test]
    fn a_batch_begins_when_full_or_after_the_timeout() {
        let rules = Rules { batch: 2, timeout_s: 0.5, slo_s: 1.2, gate: None };
        let (mut server, mut tally) = (Server::default(), Tally::default());
        // The first batch is full at 0.2 and ends at 1.2: latencies 1.2 and 1.0. The second batch
        // begins at 1.2, when the first ends. The fifth request waits for the time-out of 0.5 s.
        let mut source = at(&[0.0, 0.2, 0.5, 0.9, 5.0]);
        server.serve(&mut source, 100.0, &rules, &steps(2, 1.0, 0.0), &mut tally);
        assert_eq!((tally.requests, tally.batches, tally.busy_s), (5, 3, 3.0));
        assert_eq!(tally.late, 3, "1.7, 1.3 and 1.5 s");
        assert!((tally.quantile_s(0.5) / 1.3 - 1.0).abs() < 0.01);
        assert!((tally.quantile_s(0.99) / 1.7 - 1.0).abs() < 0.01);
    }

    #[test]
    fn serving_in_parts_gives_the_same_result() {
        let rules = Rules { batch: 8, timeout_s: 0.01, slo_s: 0.05, gate: None };
        let steps = steps(8, 0.004, 0.003);
        let play = |cuts: usize| {
            let (mut server, mut tally) = (Server::default(), Tally::default());
            let mut source = Source::new(&Requests::steady(230.0), 0.0, 0.0, Rng::stream(3, 110));
            for cut in 1..=cuts {
                let until = 100.0 * cut as f64 / cuts as f64;
                server.serve(&mut source, until, &rules, &steps, &mut tally);
            }
            (tally.requests, tally.late, tally.batches, tally.counts.to_vec())
        };
        let whole = play(1);
        assert!(whole.0 > 20_000 && whole.1 > 100, "{whole:?}");
        assert_eq!(play(777), whole);
    }

    #[test]
    fn the_mean_wait_of_an_md1_queue_is_the_textbook_value() {
        // M/D/1: mean wait = ρ/(2(1−ρ)) of a service time.
        let rules = Rules { batch: 1, timeout_s: 0.0, slo_s: f64::INFINITY, gate: None };
        let (mut server, mut tally) = (Server::default(), Tally::default());
        let mut source = Source::new(&Requests::steady(70.0), 0.0, 0.0, Rng::stream(4, 110));
        server.serve(&mut source, 20_000.0, &rules, &steps(1, 0.01, 0.0), &mut tally);
        let mean: f64 = (1..1_000).map(|i| tally.quantile_s(f64::from(i) / 1_000.0)).sum::<f64>();
        let wait = mean / 999.0 - 0.01;
        let expected = 0.7 / (2.0 * 0.3) * 0.01;
        assert!((wait / expected - 1.0).abs() < 0.03, "{wait} {expected}");
        assert!((tally.busy_s / 20_000.0 - 0.7).abs() < 0.01);
    }

    #[test]
    fn clients_of_an_overloaded_service_give_up() {
        let rules = Rules { batch: 4, timeout_s: 0.0, slo_s: 0.1, gate: None };
        let (mut server, mut tally) = (Server::default(), Tally::default());
        let mut source = Source::new(&Requests::steady(1_000.0), 0.0, 0.0, Rng::new(1));
        server.serve(&mut source, 100.0, &rules, &steps(4, 0.04, 0.0), &mut tally);
        assert!(server.waiting.len() <= 4);
        assert!(tally.late as f64 > 0.99 * tally.requests as f64);
        assert!((tally.busy_s - 100.0).abs() < 0.1);
        // Requests that are answered are answered just before their clients give up.
        assert!((tally.quantile_s(0.5) / 1.0 - 1.0).abs() < 0.06, "{}", tally.quantile_s(0.5));
        let before = tally.requests;
        server.lose(&mut source, 101.0, &rules, &mut tally);
        assert!(tally.requests > before + 900);
    }

    /// A service that is saturated beside its roommates and at 60 % of its capacity without them.
    fn gated(objective_s: f64) -> (Rules, Steps) {
        let alone = steps(8, 0.002, 0.001);
        let gate = Some(Gate { alone, objective_s });
        (Rules { batch: 8, timeout_s: 0.0, slo_s: 0.05, gate }, steps(8, 0.008, 0.002))
    }

    fn play(rules: &Rules, steps: &Steps, rate: f64) -> Tally {
        let (mut server, mut tally) = (Server::default(), Tally::default());
        let mut source = Source::new(&Requests::steady(rate), 0.0, 0.0, Rng::stream(9, 110));
        server.serve(&mut source, 100.0, rules, steps, &mut tally);
        tally
    }

    #[test]
    fn a_gate_keeps_an_objective_that_sharing_would_miss() {
        let (rules, steps) = gated(0.05);
        let open = play(&Rules { gate: None, ..rules }, &steps, 480.0);
        let guarded = play(&rules, &steps, 480.0);
        assert!(open.late as f64 > 0.5 * open.requests as f64, "{} late", open.late);
        assert!(guarded.late as f64 <= 0.01 * guarded.requests as f64, "{} late", guarded.late);
        // Roommates stand still for a part of the time only.
        assert!(guarded.closed_s > 1.0 && guarded.closed_s < 80.0, "{} s", guarded.closed_s);
        assert!(guarded.closed_s <= guarded.busy_s);
    }

    #[test]
    fn a_gate_stays_open_where_nothing_is_in_danger() {
        let (rules, steps) = gated(10.0);
        let open = play(&Rules { gate: None, ..rules }, &steps, 100.0);
        let guarded = play(&rules, &steps, 100.0);
        assert_eq!(guarded.closed_s, 0.0);
        assert_eq!((open.counts, open.busy_s), (guarded.counts, guarded.busy_s));
    }

    #[test]
    fn a_gate_for_every_batch_gives_the_speed_alone() {
        let (rules, steps) = gated(0.0);
        let guarded = play(&rules, &steps, 400.0);
        assert_eq!(guarded.closed_s, guarded.busy_s);
        let Some(gate) = rules.gate else { panic!("there is a gate") };
        let alone = play(&Rules { gate: None, ..rules }, &gate.alone, 400.0);
        let ratio = guarded.quantile_s(0.99) / alone.quantile_s(0.99);
        assert!((1.0..1.3).contains(&ratio), "{ratio}");
    }

    #[test]
    fn serving_behind_a_gate_in_parts_gives_the_same_result() {
        let (rules, steps) = gated(0.05);
        let whole = play(&rules, &steps, 480.0);
        let (mut server, mut tally) = (Server::default(), Tally::default());
        let mut source = Source::new(&Requests::steady(480.0), 0.0, 0.0, Rng::stream(9, 110));
        for cut in 1..=777 {
            let until = 100.0 * f64::from(cut) / 777.0;
            server.serve(&mut source, until, &rules, &steps, &mut tally);
        }
        assert_eq!((tally.requests, tally.late), (whole.requests, whole.late));
        assert_eq!(tally.counts, whole.counts);
    }

    #[test]
    fn larger_batches_are_never_faster() {
        let steps = Steps::new(6, [8.0, 11.0, 9.0, 12.0].into_iter());
        assert_eq!([1, 2, 4, 6].map(|n| steps.at(n)), [8.0, 10.0, 10.0, 12.0]);
        assert_eq!(steps.at(5), 11.0);
        assert_eq!(Steps::sizes(6).collect::<Vec<_>>(), [1, 2, 4, 6]);
        assert_eq!(Steps::sizes(1).collect::<Vec<_>>(), [1]);
    }
}
