//! Cache of simulated windows by conditions: request rate, batch times, rules. Each set of
//! conditions is simulated once, request by request, for some windows; a service under these
//! conditions draws its windows from them at random.
//!
//! Batch times are rounded to half a percent and rates to three digits, so that nearly equal
//! conditions share a cell. A cell depends only on its conditions, not on the time or the service
//! for which it is first needed.

use super::queue::{KNOTS, Rules, Server, Steps, Tally};
use super::requests::{Bursts, Requests, Source};
use roommate_core::math::hash;
use roommate_core::math::rng::Rng;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Requests and latency of a measuring window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Window {
    pub(super) requests: u32,
    pub(super) late: u32,
    pub(super) p50_us: u32,
    pub(super) p99_us: u32,
}

impl Window {
    /// Whether its 99th percentile is above the SLO: more than one request in a hundred was late.
    pub(super) fn is_over(&self) -> bool {
        u64::from(self.late) * 100 > u64::from(self.requests)
    }

    /// Adjusts the percentile so that it agrees with the count of late requests.
    pub(super) fn consistent(mut self, slo_s: f64) -> Self {
        if slo_s.is_finite() && self.requests > 0 {
            let slo_us = us(slo_s);
            let over = self.is_over();
            self.p99_us = if over {
                self.p99_us.max(slo_us.saturating_add(1))
            } else {
                self.p99_us.min(slo_us)
            };
        }
        self
    }

    pub(super) fn of(tally: &Tally, slo_s: f64) -> Self {
        let window = Self {
            requests: tally.requests.min(u64::from(u32::MAX)) as u32,
            late: tally.late.min(u64::from(u32::MAX)) as u32,
            p50_us: us(tally.quantile_s(0.5)),
            p99_us: us(tally.quantile_s(0.99)),
        };
        // The quantiles are read from buckets, so the percentile may disagree with the count.
        window.consistent(slo_s)
    }
}

fn us(s: f64) -> u32 {
    (s * 1e6).round().min(f64::from(u32::MAX)) as u32
}

/// The simulated windows of one set of conditions.
#[derive(Clone, Debug)]
pub(super) struct Cell {
    pub(super) windows: Box<[Window]>,
    /// Share of the time in which a batch runs.
    pub(super) busy: f64,
    /// Share of the time in which the gate is closed.
    pub(super) closed: f64,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    knots: [i16; KNOTS],
    most: u32,
    batch: u32,
    timeout_us: u64,
    slo_us: u64,
    rate: u64,
    bursts: Option<[u64; 3]>,
    /// Batch times behind the gate, and its objective.
    gate: Option<([i16; KNOTS], u64)>,
}

/// All conditions that were simulated so far.
#[derive(Debug)]
pub(super) struct Cells {
    window_s: f64,
    known: BTreeMap<Key, u32>,
    all: Vec<Cell>,
    tally: Tally,
}

/// Approximate number of requests that a cell simulates, and limits on its windows.
const REQUESTS: f64 = 60_000.0;
const FEWEST: f64 = 8.0;
const FEWEST_BURSTY: f64 = 64.0;
const MOST: f64 = 256.0;
/// Rounding of the logarithm of batch times.
const ROUND: f64 = 0.005;

impl Cells {
    pub(super) fn new(window_s: f64) -> Self {
        let tally = Tally::default();
        Self { window_s, known: BTreeMap::new(), all: Vec::new(), tally }
    }

    pub(super) fn get(&self, cell: u32) -> &Cell {
        &self.all[cell as usize]
    }

    /// The cell of these conditions.
    pub(super) fn find(
        &mut self,
        steps: &Steps,
        rules: &Rules,
        rate: f64,
        bursts: Option<Bursts>,
    ) -> u32 {
        let us = |s: f64| (s * 1e6).round() as u64;
        let rate = three_digits(rate);
        // Knots above the largest batch size are infinite, and `as` saturates.
        let rounded = |steps: &Steps| steps.knots.map(|s| (s.ln() / ROUND).round() as i16);
        let key = Key {
            knots: rounded(steps),
            gate: rules.gate.map(|g| (rounded(&g.alone), us(g.objective_s))),
            most: steps.most,
            batch: rules.batch,
            timeout_us: us(rules.timeout_s),
            slo_us: us(rules.slo_s),
            rate: rate.to_bits(),
            bursts: bursts.map(|b| [b.times, b.burst_s, b.calm_s].map(f64::to_bits)),
        };
        if let Some(known) = self.known.get(&key) {
            return *known;
        }
        let knots = key.knots.map(|k| (f64::from(k) * ROUND).exp());
        let steps = Steps { knots, most: steps.most };
        let requests = Requests::Rates { rates: Arc::new([(0.0, rate)]), bursts };
        let rng = Rng::stream(hash_of(&key), 111);
        let cell = self.simulate(&steps, rules, &requests, rng);
        self.all.push(cell);
        let at = self.all.len() as u32 - 1;
        self.known.insert(key, at);
        at
    }

    fn simulate(&mut self, steps: &Steps, rules: &Rules, requests: &Requests, rng: Rng) -> Cell {
        let (rate, _) = requests.rate(0.0);
        if rate <= 0.0 {
            return Cell { windows: Box::new([Window::default()]), busy: 0.0, closed: 0.0 };
        }
        let fewest = if requests.bursts().is_some() { FEWEST_BURSTY } else { FEWEST };
        let windows = (REQUESTS / (rate * self.window_s)).clamp(fewest, MOST).ceil() as usize;
        let mut source = Source::new(requests, 0.0, 0.0, rng);
        let mut server = Server::default();
        let tally = &mut self.tally;
        // Long enough for an overloaded queue to reach the length at which clients give up.
        let settled_s = 2.0 * rules.patience_s() + 10.0 * steps.at(rules.batch);
        tally.clear();
        server.serve(&mut source, settled_s, rules, steps, tally);
        let (mut busy_s, mut closed_s) = (0.0, 0.0);
        let window = |i: usize| {
            tally.clear();
            let until = settled_s + (i + 1) as f64 * self.window_s;
            server.serve(&mut source, until, rules, steps, tally);
            busy_s += tally.busy_s;
            closed_s += tally.closed_s;
            Window::of(tally, rules.slo_s)
        };
        let drawn: Box<[Window]> = (0..windows).map(window).collect();
        let all_s = windows as f64 * self.window_s;
        let [busy, closed] = [busy_s, closed_s].map(|s| (s / all_s).min(1.0));
        Cell { windows: drawn, busy, closed }
    }
}

fn three_digits(rate: f64) -> f64 {
    if rate <= 0.0 {
        return 0.0;
    }
    let unit = 10f64.powf(rate.log10().floor() - 2.0);
    (rate / unit).round() * unit
}

fn hash_of(key: &Key) -> u64 {
    let knots = key.knots.iter().map(|k| *k as u64);
    let rest = [u64::from(key.most), u64::from(key.batch), key.timeout_us, key.slo_us, key.rate];
    let gate = key
        .gate
        .iter()
        .flat_map(|(knots, objective)| knots.iter().map(|k| *k as u64).chain([*objective]));
    hash::words(knots.chain(rest).chain(key.bursts.into_iter().flatten()).chain(gate))
}
