//! One run of a service under given batch times, made as runs on a real GPU are made: requests come
//! at a constant rate for a while, roommates leave when the last one has come, and what still waits
//! is answered alone.

use super::queue::{Gate, Rules, Server, Steps, Tally};
use super::requests::{Requests, Source};
use roommate_core::math::rng::Rng;
use std::sync::Arc;

/// A run.
#[derive(Clone, Debug)]
pub struct Trial<'a> {
    /// Requests per second.
    pub rate: f64,
    /// Seconds in which requests come and roommates run.
    pub span_s: f64,
    /// The largest batch.
    pub batch: u32,
    /// Longest time for which a batch is filled, seconds.
    pub fill_s: f64,
    /// Batch times beside roommates, at [`sizes`].
    pub beside_s: &'a [f64],
    /// Batch times alone, at [`sizes`].
    pub alone_s: &'a [f64],
    /// The latency that a gate on the kernels of roommates defends; 0 = it closes for every batch;
    /// `None` = there is no gate.
    pub objective_s: Option<f64>,
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Median latency of answered requests, seconds.
    pub p50_s: f64,
    /// Its 99th percentile.
    pub p99_s: f64,
    /// Share of the span in which a batch ran.
    pub busy: f64,
    /// Share of the span in which the gate was closed.
    pub closed: f64,
}

/// Requests that are not answered within this multiple of the span do not count.
const GIVE_UP: f64 = 1.5;

/// The batch sizes whose times a trial needs.
pub fn sizes(batch: u32) -> impl Iterator<Item = u32> {
    Steps::sizes(batch)
}

impl Trial<'_> {
    /// Runs it with this seed.
    pub fn run(&self, seed: u64) -> Outcome {
        let mut rng = Rng::stream(seed, 114);
        let mut times = Vec::new();
        let mut at = rng.exp(1.0 / self.rate);
        while at < self.span_s {
            times.push(at);
            at += rng.exp(1.0 / self.rate);
        }
        let requests = Requests::Times { times: Arc::from(times), period_s: 1e9 };
        let mut source = Source::new(&requests, 0.0, 0.0, Rng::new(0));
        let steps = |times: &[f64]| Steps::new(self.batch, times.iter().copied());
        let (beside, alone) = (steps(self.beside_s), steps(self.alone_s));
        let gate = self.objective_s.map(|objective_s| Gate { alone, objective_s });
        let rules = Rules {
            batch: self.batch,
            timeout_s: self.fill_s,
            // Nobody gives up before the end.
            slo_s: self.span_s,
            gate,
        };
        let (mut server, mut tally) = (Server::default(), Tally::default());
        server.serve(&mut source, self.span_s, &rules, &beside, &mut tally);
        let share = |s: f64| (s / self.span_s).min(1.0);
        let (busy, closed) = (share(tally.busy_s), share(tally.closed_s));
        let rest = Rules { gate: None, ..rules };
        server.serve(&mut source, GIVE_UP * self.span_s, &rest, &alone, &mut tally);
        Outcome { p50_s: tally.quantile_s(0.5), p99_s: tally.quantile_s(0.99), busy, closed }
    }
}
