//! What is measured of every request: for the machine in short windows, for Prometheus in all.

use crate::spec::Objective;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

/// A window as the machine is told of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Served {
    window_us: u64,
    pub(crate) requests: u64,
    pub(crate) late: u64,
    refused: u64,
    failed: u64,
    p50_us: u64,
    pub(crate) p99_us: u64,
    worst_us: u64,
    pub(crate) pressure_permille: u32,
    queued: u64,
    batch: f64,
    busy_permille: u32,
    /// Part of the window for which roommates were held back.
    held_permille: u32,
    ready: bool,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// It was answered.
    Answered,
    /// The request itself was wrong; it says nothing about the service.
    Wrong,
    /// There was no room for it.
    Refused,
    /// It could not be answered in time, or the worker died.
    GivenUp,
    /// The worker answered with an error.
    Failed,
}

/// Upper bounds of the histogram, s.
const BOUNDS: [f64; 16] = [
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    30.0,
];

/// Counts of a service.
pub(crate) struct Stats {
    objective: Objective,
    began: Instant,
    /// Latencies of the window, µs.
    latencies: Vec<u64>,
    window: Served,
    batches: (u64, u64),
    busy: Duration,
    /// Seconds for which roommates were held back.
    held: f64,
    all: BTreeMap<u16, u64>,
    histogram: [u64; BOUNDS.len() + 1],
    sum_s: f64,
    late: u64,
    rows: u64,
    batch_count: u64,
    pub(crate) restarts: u64,
}

impl Stats {
    pub(crate) fn new(objective: Objective, now: Instant) -> Self {
        Self {
            objective,
            began: now,
            latencies: Vec::new(),
            window: Served::default(),
            batches: (0, 0),
            busy: Duration::ZERO,
            held: 0.0,
            all: BTreeMap::new(),
            histogram: [0; BOUNDS.len() + 1],
            sum_s: 0.0,
            late: 0,
            rows: 0,
            batch_count: 0,
            restarts: 0,
        }
    }

    /// A request ended with this HTTP status after this time.
    pub(crate) fn ended(&mut self, end: End, status: u16, latency: Duration) {
        *self.all.entry(status).or_default() += 1;
        if end == End::Wrong {
            return;
        }
        let seconds = latency.as_secs_f64();
        let late = end != End::Answered || seconds * 1e3 > self.objective.ms;
        self.window.requests += 1;
        self.window.late += u64::from(late);
        self.late += u64::from(late);
        match end {
            End::Refused => self.window.refused += 1,
            End::Failed => self.window.failed += 1,
            _ => {}
        }
        if end == End::Answered {
            self.latencies.push(latency.as_micros() as u64);
            self.histogram[BOUNDS.partition_point(|b| *b < seconds)] += 1;
            self.sum_s += seconds;
        }
    }

    /// A batch of this many rows was answered after this time.
    pub(crate) fn batch(&mut self, rows: u64, time: Duration) {
        self.batches = (self.batches.0 + 1, self.batches.1 + rows);
        (self.batch_count, self.rows) = (self.batch_count + 1, self.rows + rows);
        self.busy += time;
    }

    /// The oldest request needs this part of the objective.
    pub(crate) fn pressed(&mut self, permille: u32) {
        self.window.pressure_permille = self.window.pressure_permille.max(permille);
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.window.requests == 0 && self.window.pressure_permille == 0
    }

    /// The window so far; another one begins.
    pub(crate) fn take(
        &mut self,
        now: Instant,
        queued: usize,
        held: Duration,
        ready: bool,
    ) -> Served {
        let mut served = std::mem::take(&mut self.window);
        let window = now.duration_since(self.began);
        self.began = now;
        served.window_us = window.as_micros() as u64;
        (served.queued, served.ready) = (queued as u64, ready);
        let all = &mut self.latencies;
        all.sort_unstable();
        let at =
            |q: f64| all.get(((all.len() as f64 * q).ceil() as usize).saturating_sub(1)).copied();
        served.p50_us = at(0.5).unwrap_or(0);
        served.p99_us = at(0.99).unwrap_or(0);
        served.worst_us = all.last().copied().unwrap_or(0);
        let slow = at(self.objective.quantile).unwrap_or(0) as f64 / 1e3;
        let pressure = (1000.0 * slow / self.objective.ms).min(1e6) as u32;
        served.pressure_permille = served.pressure_permille.max(pressure);
        all.clear();
        let (batches, rows) = std::mem::take(&mut self.batches);
        served.batch = if batches == 0 { 0.0 } else { rows as f64 / batches as f64 };
        let busy = std::mem::take(&mut self.busy).as_secs_f64() / window.as_secs_f64().max(1e-6);
        served.busy_permille = (1000.0 * busy).min(1000.0) as u32;
        let held = held.as_secs_f64() / window.as_secs_f64().max(1e-6);
        served.held_permille = (1000.0 * held).min(1000.0) as u32;
        self.held += held * window.as_secs_f64();
        served
    }

    /// All counts in the text format of Prometheus.
    pub(crate) fn prometheus(&self, model: &str, queued: usize, ready: bool) -> String {
        let model: String = model.chars().filter(|c| !matches!(c, '"' | '\\' | '\n')).collect();
        let mut text = String::new();
        let head = |text: &mut String, name: &str, kind: &str, help: &str| {
            let _ = writeln!(text, "# HELP roommate_service_{name} {help}");
            let _ = writeln!(text, "# TYPE roommate_service_{name} {kind}");
        };
        head(&mut text, "requests_total", "counter", "Requests by status.");
        for (status, count) in &self.all {
            let _ = writeln!(
                text,
                "roommate_service_requests_total{{model=\"{model}\",code=\"{status}\"}} {count}"
            );
        }
        head(&mut text, "latency_seconds", "histogram", "Time from arrival to the whole answer.");
        let mut count = 0;
        for (i, n) in self.histogram.iter().enumerate() {
            count += n;
            let le = BOUNDS.get(i).map_or("+Inf".into(), ToString::to_string);
            let _ = writeln!(
                text,
                "roommate_service_latency_seconds_bucket{{model=\"{model}\",le=\"{le}\"}} {count}"
            );
        }
        let mut one = |name: &str, kind: Option<(&str, &str)>, value: f64| {
            if let Some((kind, help)) = kind {
                head(&mut text, name, kind, help);
            }
            let _ = writeln!(text, "roommate_service_{name}{{model=\"{model}\"}} {value}");
        };
        one("latency_seconds_sum", None, self.sum_s);
        one("latency_seconds_count", None, count as f64);
        let objective = self.objective.ms / 1e3;
        one("objective_seconds", Some(("gauge", "Latency that requests have to keep.")), objective);
        let late = "Requests answered later than the objective, or not at all.";
        one("late_total", Some(("counter", late)), self.late as f64);
        one("queued", Some(("gauge", "Requests that wait.")), queued as f64);
        one("ready", Some(("gauge", "Whether the worker answers.")), f64::from(u8::from(ready)));
        one("batches_total", Some(("counter", "Batches.")), self.batch_count as f64);
        one("batch_rows_total", Some(("counter", "Rows in batches.")), self.rows as f64);
        let held = "Time for which training on the same GPU was held back.";
        one("held_seconds_total", Some(("counter", held)), self.held);
        one("restarts_total", Some(("counter", "Restarts of the worker.")), self.restarts as f64);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_has_its_quantiles_and_what_was_late() {
        let now = Instant::now();
        let mut stats = Stats::new(Objective { quantile: 0.9, ms: 50.0 }, now);
        for ms in 1..=100 {
            stats.ended(End::Answered, 200, Duration::from_millis(ms));
        }
        stats.ended(End::Refused, 429, Duration::ZERO);
        stats.ended(End::Wrong, 400, Duration::ZERO);
        stats.batch(8, Duration::from_millis(50));
        let served =
            stats.take(now + Duration::from_millis(100), 3, Duration::from_millis(25), true);
        assert_eq!((served.requests, served.late, served.refused), (101, 51, 1));
        assert_eq!((served.p50_us, served.p99_us, served.worst_us), (50_000, 99_000, 100_000));
        assert_eq!((served.pressure_permille, served.busy_permille), (1800, 500));
        assert_eq!(served.held_permille, 250);
        assert!(stats.is_idle());
        let text = stats.prometheus("m", 0, true);
        assert!(text.contains("requests_total{model=\"m\",code=\"429\"} 1"), "{text}");
        assert!(text.contains("latency_seconds_bucket{model=\"m\",le=\"+Inf\"} 100"), "{text}");
    }
}
