//! The analytic queue against the simulated one, over generated services and loads.

use super::queue::{Rules, Server, Steps, Tally};
use super::requests::{Requests, Source};
use crate::truth;
use roommate_core::math::queueing::{Latencies, Queue};
use roommate_core::math::rng::Rng;
use roommate_core::math::stat;
use roommate_core::measurement::atlas::{Atlas, Tenant};
use roommate_core::measurement::rows::{self, Closed, Row, TaskKind};

/// A service and its load.
#[derive(Debug)]
struct Case {
    rate: f64,
    rules: Rules,
    steps: Steps,
    /// Request rate ÷ throughput with full batches.
    load: f64,
}

/// A random service: batch sizes 1 to 512, fixed batch times 0.3 to 100 ms, loads up to 95 %, some
/// without a time-out, and SLOs of 1 to 2.5 times batch time plus time-out.
fn case(seed: u64) -> Case {
    let mut rng = Rng::stream(seed, 112);
    let batch = 1 << rng.below(10);
    let fixed_s = 10f64.powf(-3.5 + 2.5 * rng.unit());
    let each_s = fixed_s * 10f64.powf(-2.5 + 2.5 * rng.unit());
    let steps = Steps::new(batch, Steps::sizes(batch).map(|n| fixed_s + each_s * f64::from(n)));
    let full_s = steps.at(batch);
    let load = 0.02 + 0.93 * rng.unit();
    let rate = load * f64::from(batch) / full_s;
    let timeout_s =
        if rng.chance(0.2) { 0.0 } else { full_s * 10f64.powf(-1.5 + 2.0 * rng.unit()) };
    let slo_s = (full_s + timeout_s) * (1.0 + 1.5 * rng.unit());
    Case { rate, rules: Rules { batch, timeout_s, slo_s, gate: None }, steps, load }
}

fn simulated(case: &Case, requests: f64) -> Tally {
    let mut source =
        Source::new(&Requests::steady(case.rate), 0.0, 0.0, Rng::stream(case.rate.to_bits(), 113));
    let (mut server, mut tally) = (Server::default(), Tally::default());
    let span_s = requests / case.rate;
    server.serve(&mut source, 0.1 * span_s, &case.rules, &case.steps, &mut tally);
    tally.clear();
    server.serve(&mut source, 1.1 * span_s, &case.rules, &case.steps, &mut tally);
    tally
}

/// Relative errors of the median and of the 99th percentile, the difference in the share of late
/// requests, and the error of the 99th percentile at loads below 90 %.
fn errors(cases: u64, requests: f64) -> [Vec<f64>; 4] {
    let mut latencies = Latencies::default();
    let mut errors = [const { Vec::new() }; 4];
    for seed in 0..cases {
        let case = case(seed);
        let exact = simulated(&case, requests);
        let Case { rate, rules, .. } = case;
        let Rules { batch, timeout_s, slo_s, .. } = rules;
        let batch_s = |n: u32| case.steps.at(n);
        assert!(latencies.solve(&Queue { rate, batch, timeout_s, batch_s: &batch_s }), "{case:?}");
        for (error, q) in errors.iter_mut().zip([0.5, 0.99]) {
            error.push((latencies.quantile_s(q) / exact.quantile_s(q) - 1.0).abs());
        }
        let late = exact.late as f64 / exact.requests as f64;
        errors[2].push((latencies.late(slo_s) - late).abs());
        if case.load < 0.9 {
            errors[3].push((latencies.quantile_s(0.99) / exact.quantile_s(0.99) - 1.0).abs());
        }
    }
    errors.iter_mut().for_each(|e| e.sort_unstable_by(f64::total_cmp));
    errors
}

#[test]
fn the_analytic_queue_is_close_to_the_simulated_one() {
    let [median, p99, late, below] = errors(600, 40_000.0);
    let show = |e: &[f64]| [0.5, 0.9, 0.99].map(|q| stat::quantile(e, q).unwrap_or(1.0));
    let [median, p99, late, below] = [&median, &p99, &late, &below].map(|e| show(e));
    assert!(median[0] < 0.03 && median[1] < 0.1, "{median:?}");
    assert!(p99[0] < 0.05 && p99[1] < 0.15, "{p99:?}");
    assert!(below[0] < 0.03 && below[1] < 0.12 && below[2] < 0.4, "{below:?}");
    assert!(late[1] < 0.02 && late[2] < 0.06, "{late:?}");
}

/// A measurement of a service beside training, with the latencies of the service.
#[derive(serde::Deserialize)]
struct Open {
    k: String,
    a: String,
    batch_a: u32,
    b: String,
    batch_b: u32,
    sms_a: u32,
    sms_b: u32,
    rate_b: f64,
    rb: Side,
}

#[derive(serde::Deserialize)]
struct Side {
    p50_ms: f64,
    p99_ms: f64,
}

fn tenants(atlas: &Atlas, a: (&str, u32, u32), b: (&str, u32, u32), load: f64) -> [Tenant; 2] {
    let tenant = |kind, (name, batch, sms): (&str, u32, u32), load| {
        let task = atlas.task(kind, name).unwrap();
        Tenant { sms: Some(sms), load, ..Tenant::plain(task, batch) }
    };
    [tenant(TaskKind::Serve, b, load), tenant(TaskKind::Train, a, 1.0)]
}

fn spread(errors: &mut [f64]) -> [f64; 2] {
    errors.sort_unstable_by(f64::total_cmp);
    [0.5, 0.9].map(|q| stat::quantile(errors, q).unwrap())
}

#[test]
fn latency_beside_training_agrees_with_measurements() {
    let atlas = truth::h200().unwrap();
    // Closed loop: the rows to which the slowdown was fitted. Batch times alone differ between
    // measuring sessions, so each row is divided by the time alone of its own session.
    let text = include_str!("../../../../profiles/h200-curves.jsonl");
    let rows = rows::parse(text).unwrap();
    let alone = |b: &str, batch: u32, sms: u32| {
        rows.iter().find_map(|r| match r {
            Row::Solo(s) if s.kind == TaskKind::Serve => {
                ((s.name.as_str(), s.batch, s.sms) == (b, batch, sms)).then_some(s.it_s)
            }
            _ => None,
        })
    };
    let mut closed = Vec::new();
    for row in &rows {
        let Row::Closed(Closed { a, batch_a, b, batch_b, sms_a, sms_b, rb, .. }) = row else {
            continue;
        };
        let Some(alone) = alone(b, *batch_b, *sms_b) else { continue };
        let two = tenants(&atlas, (a, *batch_a, *sms_a), (b, *batch_b, *sms_b), 1.0);
        closed.push((atlas.slowdown(&two, 0) / (alone / rb.it_s) - 1.0).abs());
    }
    // Open loop, with Poisson arrivals: no model was fitted to these rows.
    let text = include_str!("../../../../profiles/h200-pairs.jsonl");
    let (mut p50, mut p99) = (Vec::new(), Vec::new());
    for row in text.lines().filter_map(|l| serde_json::from_str::<Open>(l).ok()) {
        assert_eq!(row.k, "ts");
        let (a, b) = ((&*row.a, row.batch_a, row.sms_a), (&*row.b, row.batch_b, row.sms_b));
        let two = tenants(&atlas, a, b, 0.5);
        let batch_s = atlas.batch_s(two[0].task, row.batch_b, two[0].sms) * atlas.slowdown(&two, 0);
        let steps = Steps::new(1, std::iter::once(batch_s));
        let rules = Rules { batch: 1, timeout_s: 0.0, slo_s: f64::INFINITY, gate: None };
        if batch_s * row.rate_b > 0.9 {
            continue;
        }
        let case = Case { rate: row.rate_b, rules, steps, load: 0.0 };
        let tally = simulated(&case, 20_000.0);
        p50.push((tally.quantile_s(0.5) * 1e3 / row.rb.p50_ms - 1.0).abs());
        p99.push((tally.quantile_s(0.99) * 1e3 / row.rb.p99_ms - 1.0).abs());
    }
    let counts = (closed.len(), p50.len());
    let [closed, p50, p99] = [&mut closed, &mut p50, &mut p99].map(|e| spread(e));
    assert!(counts.0 > 800 && counts.1 > 80, "{counts:?}");
    assert!(closed[0] < 0.08 && closed[1] < 0.35, "{closed:?}");
    assert!(p50[0] < 0.35 && p99[0] < 0.25, "{p50:?} {p99:?}");
}
