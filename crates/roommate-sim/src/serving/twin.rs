//! The analytic queue against the simulated one, over generated services and loads.

use super::queue::{Desk, Rules, Steps, Tally};
use super::requests::{Requests, Source};
use roommate_core::math::queueing::{Latencies, Queue};
use roommate_core::math::rng::Rng;
use roommate_core::math::stat;

/// A service and its load.
#[derive(Debug)]
struct Case {
    rate: f64,
    rules: Rules,
    steps: Steps,
    /// Requests ÷ what full batches could answer.
    load: f64,
}

/// Batches from 1 to 512 of services from a few hundred µs to a few hundred ms, objectives around what they
/// can keep, time-outs from none to half of that.
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
    Case { rate, rules: Rules { batch, timeout_s, slo_s }, steps, load }
}

fn simulated(case: &Case, requests: f64) -> Tally {
    let mut source =
        Source::new(&Requests::steady(case.rate), 0.0, 0.0, Rng::stream(case.rate.to_bits(), 113));
    let (mut desk, mut tally) = (Desk::default(), Tally::default());
    let span_s = requests / case.rate;
    desk.serve(&mut source, 0.1 * span_s, &case.rules, &case.steps, &mut tally);
    tally.clear();
    desk.serve(&mut source, 1.1 * span_s, &case.rules, &case.steps, &mut tally);
    tally
}

/// Relative errors of the median and of the 99th percentile, and the difference in the share of late requests.
fn errors(cases: u64, requests: f64) -> [Vec<f64>; 3] {
    let mut latencies = Latencies::default();
    let mut errors = [Vec::new(), Vec::new(), Vec::new()];
    for seed in 0..cases {
        let case = case(seed);
        let exact = simulated(&case, requests);
        let Case { rate, rules, .. } = case;
        let Rules { batch, timeout_s, slo_s } = rules;
        let batch_s = |n: u32| case.steps.at(n);
        assert!(latencies.solve(&Queue { rate, batch, timeout_s, batch_s: &batch_s }), "{case:?}");
        for (error, q) in errors.iter_mut().zip([0.5, 0.99]) {
            error.push((latencies.quantile_s(q) / exact.quantile_s(q) - 1.0).abs());
        }
        let late = exact.late as f64 / exact.requests as f64;
        errors[2].push((latencies.late(slo_s) - late).abs());
    }
    errors.iter_mut().for_each(|e| e.sort_unstable_by(f64::total_cmp));
    errors
}

#[test]
fn the_analytic_queue_is_close_to_the_simulated_one() {
    let [median, p99, late] = errors(600, 40_000.0);
    let show = |e: &[f64]| [0.5, 0.9, 0.99].map(|q| stat::quantile(e, q).unwrap_or(1.0));
    let [median, p99, late] = [&median, &p99, &late].map(|e| show(e));
    eprintln!("median {median:.4?}\np99 {p99:.4?}\nlate {late:.4?}");
    assert!(p99[0] < 0.05 && p99[1] < 0.15, "{p99:?}");
}

#[test]
#[ignore = "prints the table of docs/reference/serving.md"]
fn where_the_analytic_queue_errs() {
    let mut latencies = Latencies::default();
    for seed in 0..2_000 {
        let case = case(seed);
        let exact = simulated(&case, 40_000.0);
        let batch_s = |n: u32| case.steps.at(n);
        let Rules { batch, timeout_s, .. } = case.rules;
        latencies.solve(&Queue { rate: case.rate, batch, timeout_s, batch_s: &batch_s });
        let ratio = latencies.quantile_s(0.99) / exact.quantile_s(0.99);
        let full_s = case.steps.at(batch);
        println!(
            "{seed} {batch} {:.3} {:.3} {:.3} {:.4} {:.4} {:.3}",
            case.load,
            timeout_s / full_s,
            case.rate * timeout_s / f64::from(batch),
            exact.quantile_s(0.99) / full_s,
            ratio,
            latencies.busy / (exact.busy_s * case.rate / 40_000.0),
        );
    }
}
