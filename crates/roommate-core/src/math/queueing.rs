//! Latency of a batching queue, without simulating it.
//!
//! Requests arrive independently at a constant rate. A batch starts when it is full, or when its
//! oldest request has waited for the time-out; one batch runs at a time, for a time that depends on
//! its size.
//!
//! The solution is that of the Markov chain of the queue length at the end of each batch. Three
//! things are approximations: the oldest waiting request has its mean age; a batch has the mean
//! size that follows each queue length; and long queues are counted in groups. The latency of a
//! request is then the rest of the running batch, the full batches before its own, the time to fill
//! its own, and its own batch time.
//!
//! The request-level twin is the simulator's queue; the error between them is a test and is in
//! `docs/reference/serving.md`.

/// Parameters of a queue.
#[derive(Clone, Copy)]
pub struct Queue<'a> {
    /// Requests per second.
    pub rate: f64,
    /// Largest number of requests in a batch.
    pub batch: u32,
    /// Longest time a request waits for others while no batch runs, seconds.
    pub timeout_s: f64,
    /// Seconds per batch by its size; must not decrease.
    pub batch_s: &'a dyn Fn(u32) -> f64,
}

/// The latencies of a queue; keeps its buffers, so that solving again allocates nothing.
#[derive(Clone, Debug, Default)]
pub struct Latencies {
    /// Weight by bucket of latency.
    buckets: Vec<f64>,
    total: f64,
    /// Share of time during which a batch runs.
    pub busy: f64,
    /// Mean size of a batch.
    pub mean_batch: f64,
    chain: Vec<f64>,
    states: Vec<State>,
    poisson: Vec<f64>,
}

/// A state of the chain: the queue length when a batch ends, and what follows.
#[derive(Clone, Copy, Debug, Default)]
struct State {
    /// Requests waiting.
    waiting: f64,
    /// Stationary probability.
    weight: f64,
    /// Mean time of the batch that just ended.
    before_s: f64,
    /// Seconds from then, or from the first request if the queue is empty, until the next batch
    /// starts.
    fill_s: f64,
    /// Size of the next batch.
    size: f64,
    /// Seconds that the next batch takes.
    took_s: f64,
    /// Requests left waiting when it starts.
    left: f64,
}

/// Largest number of states; longer queues are grouped.
const STATES: usize = 80;
/// Number of parts of a batch's time in which an arrival is placed.
const PARTS: usize = 8;
/// Buckets per doubling of latency.
const FINE: u32 = 32;
const SHIFT: u32 = 52 - FINE.ilog2();
/// 2⁻²⁰ s to 2¹² s.
const FIRST: u64 = (1023 - 20) << FINE.ilog2();
const BUCKETS: usize = 32 * FINE as usize;

impl Latencies {
    /// Solves a queue; false if it is unstable, and then every latency is infinite.
    pub fn solve(&mut self, queue: &Queue<'_>) -> bool {
        self.buckets.clear();
        self.buckets.resize(BUCKETS, 0.0);
        (self.total, self.busy, self.mean_batch) = (0.0, 0.0, 0.0);
        let most = f64::from(queue.batch.max(1));
        let full_s = (queue.batch_s)(queue.batch.max(1));
        if queue.rate <= 0.0 {
            return true;
        }
        // The capacity must exceed the rate by more than rounding.
        let spare = most - queue.rate * full_s;
        if spare <= 1e-3 * most || !full_s.is_finite() {
            self.busy = 1.0;
            return false;
        }
        let group = self.lay_out(queue, spare);
        // The mean times of previous batches depend on the solution, and converge quickly.
        for _ in 0..3 {
            self.follow(queue);
            self.link(queue.rate, group);
            self.balance();
            self.look_back();
        }
        self.collect(queue);
        true
    }

    /// The latency that this share of requests does not exceed.
    pub fn quantile_s(&self, q: f64) -> f64 {
        if self.total == 0.0 {
            return if self.busy >= 1.0 { f64::INFINITY } else { 0.0 };
        }
        let rank = q * self.total;
        let mut before = 0.0;
        for (bucket, weight) in self.buckets.iter().enumerate() {
            if *weight > 0.0 && before + weight >= rank {
                let part = (rank - before) / weight;
                return edge(bucket) + part * (edge(bucket + 1) - edge(bucket));
            }
            before += weight;
        }
        edge(BUCKETS)
    }

    /// The share of requests that take longer than this.
    pub fn late(&self, slo_s: f64) -> f64 {
        if self.total == 0.0 {
            return if self.busy >= 1.0 { 1.0 } else { 0.0 };
        }
        let at = bucket_of(slo_s);
        let after: f64 = self.buckets[at + 1..].iter().sum();
        let part = (edge(at + 1) - slo_s) / (edge(at + 1) - edge(at));
        (after + self.buckets[at] * part.clamp(0.0, 1.0)) / self.total
    }

    /// Chooses the states; returns how many requests one state stands for.
    fn lay_out(&mut self, queue: &Queue<'_>, spare: f64) -> f64 {
        let full_s = (queue.batch_s)(queue.batch.max(1));
        let come = queue.rate * full_s;
        // Arrivals during a full batch, rarely more, plus the random backlog, which decays by e for
        // each variance ÷ (2 × drift).
        let most = come + 6.0 * come.sqrt() + 5.0 * (0.5 * come / spare) + 6.0;
        let group = (most / STATES as f64).ceil().max(1.0);
        let n = (most / group).ceil() as usize + 1;
        self.states.clear();
        self.states.extend((0..n).map(|i| State {
            waiting: i as f64 * group,
            before_s: full_s.min((queue.batch_s)(1)),
            ..State::default()
        }));
        group
    }

    /// Computes the next batch of each state.
    fn follow(&mut self, queue: &Queue<'_>) {
        let most = f64::from(queue.batch.max(1));
        for state in &mut self.states {
            let waiting = state.waiting;
            let (first, spare_s) = if waiting < 1.0 {
                // The first request has yet to arrive, and waits for the whole time-out.
                (1.0, queue.timeout_s)
            } else {
                let oldest_s = state.before_s * waiting / (waiting + 1.0);
                (waiting, (queue.timeout_s - oldest_s).max(0.0))
            };
            state.size = if first >= most {
                most
            } else {
                first + least(queue.rate * spare_s, most - first)
            };
            // Arrivals while it fills follow the rate.
            state.fill_s = ((state.size - first) / queue.rate).clamp(0.0, spare_s);
            state.left = (waiting - most).max(0.0);
            state.took_s = at_size(queue.batch_s, state.size);
        }
    }

    /// Transition probabilities.
    fn link(&mut self, rate: f64, group: f64) {
        let n = self.states.len();
        self.chain.clear();
        self.chain.resize(n * n, 0.0);
        for (i, from) in self.states.iter().enumerate() {
            let row = &mut self.chain[i * n..(i + 1) * n];
            poisson(rate * from.took_s, &mut self.poisson);
            for (come, chance) in self.poisson.iter().enumerate() {
                let waiting = (from.left + come as f64) / group;
                let (low, part) = (waiting.floor() as usize, waiting.fract());
                row[low.min(n - 1)] += chance * (1.0 - part);
                row[(low + 1).min(n - 1)] += chance * part;
            }
        }
    }

    /// Stationary distribution: elimination without subtraction (Grassmann, Taksar and Heyman).
    fn balance(&mut self) {
        let n = self.states.len();
        let chain = &mut self.chain;
        let links = chain.clone();
        for k in (1..n).rev() {
            let out: f64 = chain[k * n..k * n + k].iter().sum::<f64>().max(f64::MIN_POSITIVE);
            for i in 0..k {
                let into = chain[i * n + k] / out;
                chain[i * n + k] = into;
                if into > 0.0 {
                    for j in 0..k {
                        chain[i * n + j] += into * chain[k * n + j];
                    }
                }
            }
        }
        self.states[0].weight = 1.0;
        let mut sum = 1.0;
        for k in 1..n {
            let weight = (0..k).map(|i| self.states[i].weight * chain[i * n + k]).sum();
            self.states[k].weight = weight;
            sum += weight;
        }
        self.states.iter_mut().for_each(|s| s.weight /= sum);
        *chain = links;
    }

    /// Mean time of the previous batch, by state.
    fn look_back(&mut self) {
        let n = self.states.len();
        for k in 0..n {
            let (mut sum, mut weight) = (0.0, 0.0);
            for i in 0..n {
                let flow = self.states[i].weight * self.chain[i * n + k];
                sum += flow * self.states[i].took_s;
                weight += flow;
            }
            if weight > 0.0 {
                self.states[k].before_s = sum / weight;
            }
        }
    }

    /// Latencies of all requests, by when they arrive.
    fn collect(&mut self, queue: &Queue<'_>) {
        let n = self.states.len();
        let most = f64::from(queue.batch.max(1));
        let full_s = (queue.batch_s)(queue.batch.max(1));
        let (mut cycle_s, mut busy_s, mut batches) = (0.0, 0.0, 0.0);
        for i in 0..n {
            let from = self.states[i];
            if from.weight < 1e-9 {
                continue;
            }
            let idle_s = if from.waiting < 1.0 { 1.0 / queue.rate } else { 0.0 };
            cycle_s += from.weight * (idle_s + from.fill_s + from.took_s);
            busy_s += from.weight * from.took_s;
            batches += from.weight * from.size;
            // While no batch runs: the first request waits for the whole time, the others for a
            // part.
            let first = f64::from(u8::from(from.waiting < 1.0));
            self.add(from.weight * first, from.fill_s + from.took_s);
            let others = from.weight * queue.rate * from.fill_s / PARTS as f64;
            for part in 0..PARTS {
                let rest = (part as f64 + 0.5) / PARTS as f64;
                self.add(others, rest * from.fill_s + from.took_s);
            }
            // While a batch runs.
            for k in 0..n {
                let next = self.states[k];
                let come = next.waiting - from.left;
                let weight = from.weight * self.chain[i * n + k] * come / PARTS as f64;
                if weight < 1e-9 {
                    continue;
                }
                for part in 0..PARTS {
                    let since = (part as f64 + 0.5) / PARTS as f64;
                    let ahead = ((from.left + since * come) / most).floor();
                    let own_s = if ahead == 0.0 {
                        next.fill_s + next.took_s
                    } else {
                        let with = next.waiting - ahead * most + queue.rate * ahead * full_s;
                        ahead * full_s + at_size(queue.batch_s, with.min(most))
                    };
                    self.add(weight, (1.0 - since) * from.took_s + own_s);
                }
            }
        }
        self.busy = busy_s / cycle_s;
        self.mean_batch = batches;
    }

    fn add(&mut self, weight: f64, latency_s: f64) {
        self.buckets[bucket_of(latency_s)] += weight;
        self.total += weight;
    }
}

fn bucket_of(latency_s: f64) -> usize {
    let bucket = (latency_s.max(0.0).to_bits() >> SHIFT).saturating_sub(FIRST) as usize;
    bucket.min(BUCKETS - 1)
}

/// Lower bound of a bucket, seconds.
fn edge(bucket: usize) -> f64 {
    f64::from_bits((bucket as u64 + FIRST) << SHIFT)
}

/// Linear between whole sizes.
fn at_size(batch_s: &dyn Fn(u32) -> f64, size: f64) -> f64 {
    let size = size.max(1.0);
    let low = size.floor();
    let part = size - low;
    let low_s = batch_s(low as u32);
    if part < 1e-9 { low_s } else { low_s + part * (batch_s(low as u32 + 1) - low_s) }
}

/// Mean of min(limit, Poisson number of this mean), by the normal approximation.
fn least(mean: f64, limit: f64) -> f64 {
    let std = mean.sqrt();
    if std < 1e-9 {
        return mean.min(limit);
    }
    let z = (limit - mean) / std;
    let density = (-0.5 * z * z).exp() / std::f64::consts::TAU.sqrt();
    (limit - std * (z * below(z) + density)).clamp(0.0, mean.min(limit))
}

/// Standard normal distribution function (Abramowitz and Stegun 26.2.17; within 1e-7).
fn below(z: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.231_641_9 * z.abs());
    let poly = t
        * (0.319_381_530
            + t * (-0.356_563_782
                + t * (1.781_477_937 + t * (-1.821_255_978 + t * 1.330_274_429))));
    let tail = (-0.5 * z * z).exp() / std::f64::consts::TAU.sqrt() * poly;
    if z >= 0.0 { 1.0 - tail } else { tail }
}

/// Probabilities of 0, 1, 2, … events of a Poisson distribution, up to a negligible rest.
fn poisson(mean: f64, chances: &mut Vec<f64>) {
    chances.clear();
    let last = (mean + 7.0 * mean.sqrt() + 8.0).ceil() as usize;
    let ln_mean = mean.max(f64::MIN_POSITIVE).ln();
    let mut ln = -mean;
    let mut sum = 0.0;
    for k in 0..=last {
        if k > 0 {
            ln += ln_mean - (k as f64).ln();
        }
        let chance = ln.exp();
        sum += chance;
        chances.push(chance);
    }
    chances.iter_mut().for_each(|c| *c /= sum);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn solve(rate: f64, batch: u32, timeout_s: f64, batch_s: &dyn Fn(u32) -> f64) -> Latencies {
        let mut latencies = Latencies::default();
        latencies.solve(&Queue { rate, batch, timeout_s, batch_s });
        latencies
    }

    #[test]
    fn no_request_waits_at_a_low_rate() {
        let quiet = solve(0.01, 16, 0.005, &|n| 0.01 + 0.001 * f64::from(n));
        for q in [0.1, 0.5, 0.9] {
            // The time-out plus a batch of one.
            assert!((quiet.quantile_s(q) / 0.016 - 1.0).abs() < 0.03, "{}", quiet.quantile_s(q));
        }
        assert!((quiet.mean_batch - 1.0).abs() < 1e-3);
        assert!(quiet.late(0.02) < 1e-3 && quiet.late(0.01) > 0.999);
    }

    #[test]
    fn an_empty_or_unstable_queue_is_reported() {
        let none = solve(0.0, 4, 0.0, &|_| 1.0);
        assert_eq!((none.quantile_s(0.99), none.late(0.1), none.busy), (0.0, 0.0, 0.0));
        let drowned = solve(5.0, 4, 0.0, &|_| 1.0);
        assert_eq!((drowned.late(10.0), drowned.busy), (1.0, 1.0));
        assert_eq!(drowned.quantile_s(0.5), f64::INFINITY);
    }

    #[test]
    fn single_requests_wait_as_queueing_theory_says() {
        // M/D/1 at 70 %: the mean wait is 0.7 / (2 × 0.3) of a service time.
        let queue = solve(70.0, 1, 0.0, &|_| 0.01);
        let mean: f64 = (0..1_000).map(|i| queue.quantile_s((f64::from(i) + 0.5) / 1e3)).sum();
        let wait_s = mean / 1e3 - 0.01;
        assert!((wait_s / 0.011_67 - 1.0).abs() < 0.05, "{wait_s}");
        assert!((queue.busy - 0.7).abs() < 0.01, "{}", queue.busy);
    }

    #[test]
    fn more_requests_slower_batches_and_longer_waits_take_longer() {
        let batch_s = |n: u32| 0.004 + 0.000_4 * f64::from(n);
        let p99 = |rate: f64, timeout_s: f64, slow: f64| {
            solve(rate, 16, timeout_s, &|n| slow * batch_s(n)).quantile_s(0.99)
        };
        // Beyond the load at which batches fill without waiting.
        let by_rate: Vec<f64> = [900.0, 1_200.0, 1_400.0].map(|r| p99(r, 0.0, 1.0)).into();
        assert!(by_rate.is_sorted(), "{by_rate:?}");
        let by_speed: Vec<f64> = [1.0, 1.2, 1.5, 2.0].map(|s| p99(300.0, 0.01, s)).into();
        assert!(by_speed.is_sorted(), "{by_speed:?}");
        assert!(p99(50.0, 0.02, 1.0) > p99(50.0, 0.01, 1.0));
    }
}
