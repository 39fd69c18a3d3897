//! Errors of latency curves and latency predictors on our measurements (`profiles/`) and on public
//! ones (in `../shared`, outside the repository). `docs/reference/fits.md` shows the result and is
//! compared with it. Without the public measurements this test prints that it is skipped and
//! passes, unless `ROOMMATE_REQUIRE_SHARED=1`.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "this is a test")]

mod shared;

use roommate_core::math::piecewise::{Point, TwoLines};
use roommate_core::math::pool::{Pool, Row};
use roommate_core::math::stat::mean;
use roommate_core::performance::latency::{Axis, Curve};
use serde_json::Value;
use shared::shared;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Read;
use std::path::Path;

fn text(path: &Path) -> String {
    let mut text = String::new();
    roommate_sim::trace::gzip::open(path).unwrap().read_to_string(&mut text).unwrap();
    text
}

fn json_lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn num(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

// Curves.

/// A method of fitting a curve to samples.
type Fit = fn(&[Point]) -> Option<Box<dyn Fn(f64) -> f64>>;

fn published(points: &[Point]) -> Option<Box<dyn Fn(f64) -> f64>> {
    let lines = TwoLines::fit(points)?;
    Some(Box::new(move |x| lines.at(x)))
}

fn freely(points: &[Point]) -> Option<Box<dyn Fn(f64) -> f64>> {
    let lines = TwoLines::fit_freely(points)?;
    Some(Box::new(move |x| lines.at(x)))
}

fn inverse(points: &[Point]) -> Option<Box<dyn Fn(f64) -> f64>> {
    let curve = Curve::fit(Axis::Inverse, points)?;
    Some(Box::new(move |x| curve.at(x)))
}

/// A least-squares polynomial of degree three, or of a lower degree where there are too few
/// samples.
fn cubic(points: &[Point]) -> Option<Box<dyn Fn(f64) -> f64>> {
    let degree = 3.min(points.len() - 2);
    let n = degree + 1;
    let mut m = vec![vec![0.0; n + 1]; n];
    for (x, y) in points {
        for (i, row) in m.iter_mut().enumerate() {
            for (k, cell) in row.iter_mut().enumerate() {
                *cell += x.powi(i as i32) * if k < n { x.powi(k as i32) } else { *y };
            }
        }
    }
    for c in 0..n {
        let pivot = (c..n).max_by(|a, b| m[*a][c].abs().total_cmp(&m[*b][c].abs()))?;
        m.swap(c, pivot);
        let lead = m[c].clone();
        for (r, row) in m.iter_mut().enumerate() {
            let factor = row[c] / lead[c];
            if r != c {
                row.iter_mut().zip(&lead).for_each(|(v, l)| *v -= factor * l);
            }
        }
    }
    let coefficients: Vec<f64> = (0..n).map(|i| m[i][n] / m[i][i]).collect();
    Some(Box::new(move |x| coefficients.iter().rev().fold(0.0, |sum, c| sum * x + c)))
}

const WAYS: [(&str, Fit); 4] = [
    ("two lines through a sample (published)", published),
    ("two lines, height free", freely),
    ("polynomial, degree 3", cubic),
    ("two lines over 1/share (ours)", inverse),
];

/// Relative errors at the samples left out, over all choices of `kept` samples. Both end points are
/// always kept, because policies do not extrapolate.
fn errors(points: &[Point], kept: usize, fit: Fit) -> Vec<f64> {
    let n = points.len();
    let mut errors = Vec::new();
    for mask in 0u32..1 << n {
        let is_kept = |i: usize| mask >> i & 1 == 1;
        if mask.count_ones() as usize != kept || !is_kept(0) || !is_kept(n - 1) {
            continue;
        }
        let samples: Vec<Point> = (0..n).filter(|i| is_kept(*i)).map(|i| points[i]).collect();
        let Some(curve) = fit(&samples) else { continue };
        let out = (0..n).filter(|i| !is_kept(*i)).map(|i| points[i]);
        errors.extend(out.map(|(x, y)| (curve(x) - y).abs() / y));
    }
    errors
}

fn residuals(points: &[Point], fit: Fit) -> Vec<f64> {
    let curve = fit(points).unwrap();
    points.iter().map(|(x, y)| (curve(*x) - y).abs() / y).collect()
}

/// Our measured services, our measured training steps, and the services of iGniter.
fn curves(shared: &Path) -> BTreeMap<&'static str, Vec<Vec<Point>>> {
    let mut by_task: BTreeMap<(bool, String, u64), Vec<Point>> = BTreeMap::new();
    for row in json_lines(include_str!("../../../profiles/h200.jsonl")) {
        let is_service = row["kind"] == "serve";
        let key = (is_service, row["name"].to_string(), row["batch"].as_u64().unwrap());
        // A service counts by its 99th percentile, a training step by its mean.
        let seconds = if is_service { num(&row["p99_ms"]) / 1e3 } else { 1.0 / num(&row["it_s"]) };
        by_task.entry(key).or_default().push((num(&row["sms"]) / 132.0, seconds));
    }
    let mut again: BTreeMap<(String, u64), Vec<Point>> = BTreeMap::new();
    for row in json_lines(include_str!("../../../profiles/h200-curves.jsonl")) {
        if row["kind"] == "serve" {
            let key = (row["name"].to_string(), row["batch"].as_u64().unwrap());
            let point = (num(&row["sms"]) / 132.0, num(&row["p50_ms"]) / 1e3);
            again.entry(key).or_default().push(point);
        }
    }
    let mut curves: BTreeMap<&'static str, Vec<Vec<Point>>> = BTreeMap::new();
    for ((_, batch), mut points) in again {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let what = if batch >= 16 {
            "H200 services, batch 16 to 128, median, second session"
        } else {
            "H200 services, batch 1 to 8, median, second session"
        };
        if points.len() >= 5 {
            curves.entry(what).or_default().push(points);
        }
    }
    for ((is_service, _, batch), mut points) in by_task {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let what = match (is_service, batch) {
            (true, 16..) => "H200 services, batch 16 and 64, p99",
            (true, _) => "H200 services, batch 1 and 4, p99",
            (false, _) => "H200 training steps",
        };
        if points.len() >= 5 {
            curves.entry(what).or_default().push(points);
        }
    }
    let file = shared.join("traces/igniter/latency_by_batch_and_sm_share.jsonl.gz");
    for object in json_lines(&text(&file)) {
        for (model, tables) in object.as_object().unwrap() {
            let Some(by_batch) = tables["latency"].as_object().filter(|_| model != "interference")
            else {
                continue;
            };
            for by_share in by_batch.values() {
                let mut points: Vec<Point> = by_share
                    .as_object()
                    .unwrap()
                    .iter()
                    .map(|(share, ms)| (share.parse::<f64>().unwrap() / 100.0, num(ms) / 1e3))
                    .collect();
                points.sort_by(|a, b| a.0.total_cmp(&b.0));
                curves.entry("iGniter inference (V100)").or_default().push(points);
            }
        }
    }
    curves
}

fn curve_table(shared: &Path) -> String {
    let mut table = String::from(
        "| curves | way | 4 samples | 5 samples | 6 samples | residual of all |\n\
         |---|---|---|---|---|---|\n",
    );
    let percent =
        |errors: &[f64]| mean(errors).map_or("-".into(), |e| format!("{:.1} %", e * 100.0));
    for (what, curves) in curves(shared) {
        for (name, fit) in WAYS {
            let of = |kept: usize| -> Vec<f64> {
                let long = curves.iter().filter(|c| c.len() > kept);
                long.flat_map(|c| errors(c, kept, fit)).collect()
            };
            let all: Vec<f64> = curves.iter().flat_map(|c| residuals(c, fit)).collect();
            let cells = [of(4), of(5), of(6), all].map(|e| percent(&e)).join(" | ");
            writeln!(table, "| {what} ({}) | {name} | {cells} |", curves.len()).unwrap();
        }
    }
    table
}

// Predictors.

/// One latency of a service beside a co-located job.
struct Pair {
    /// Name of the co-located job; the rows of one are left out together.
    partner: String,
    /// Seconds beside it, and alone with the same share.
    beside: f64,
    alone: f64,
    layers: Vec<f64>,
    counters: Vec<f64>,
}

/// Relative errors of latencies beside co-located jobs that were left out of training; the model
/// family is chosen without them too.
fn unseen(pairs: &[Pair], features: impl Fn(&Pair) -> Vec<f64>) -> Vec<f64> {
    let names: BTreeSet<&str> = pairs.iter().map(|p| p.partner.as_str()).collect();
    let names: Vec<&str> = names.into_iter().collect();
    let row = |p: &Pair| Row {
        x: features(p),
        y: (p.beside / p.alone).ln(),
        group: names.iter().position(|n| *n == p.partner).unwrap() as u32,
    };
    let mut errors = Vec::new();
    for left_out in &names {
        let (out, kept): (Vec<&Pair>, Vec<&Pair>) =
            pairs.iter().partition(|p| p.partner == *left_out);
        let pool = Pool::fit(&kept.iter().map(|p| row(p)).collect::<Vec<_>>()).unwrap();
        let predicted = |p: &Pair| p.alone * pool.predict(&features(p)).exp();
        errors.extend(out.iter().map(|p| (predicted(p) - p.beside).abs() / p.beside));
    }
    errors
}

/// Convolutions, linear, activations, norms, pooling, others; SSD is SSD300 on VGG16.
const IGNITER_LAYERS: [(&str, [f64; 6]); 4] = [
    ("alexnet", [5.0, 3.0, 7.0, 0.0, 4.0, 3.0]),
    ("resnet50", [53.0, 1.0, 49.0, 53.0, 2.0, 1.0]),
    ("ssd", [35.0, 0.0, 23.0, 1.0, 5.0, 1.0]),
    ("vgg19", [16.0, 3.0, 18.0, 0.0, 6.0, 3.0]),
];

struct IgniterSide {
    service: String,
    batch: f64,
    partner_batch: f64,
    share: f64,
    pair: Pair,
}

fn igniter(shared: &Path) -> Vec<IgniterSide> {
    let file = shared.join("traces/igniter/latency_by_batch_and_sm_share.jsonl.gz");
    let mut alone = Value::Object(<_>::default());
    let mut pairs = Vec::new();
    for object in json_lines(&text(&file)) {
        for (model, tables) in object.as_object().unwrap() {
            if model == "interference" {
                pairs.extend(tables["latency"].as_array().cloned().unwrap_or_default());
                continue;
            }
            for (table, values) in tables.as_object().unwrap() {
                alone[model][table] = values.clone();
            }
        }
    }
    let at = |model: &str, table: &str, batch: f64, share: f64| {
        num(&alone[model][table][batch.to_string()][share.to_string()])
    };
    let mut sides = Vec::new();
    for pair in pairs {
        let name = |i: usize| pair[i].as_str().unwrap().to_owned();
        let batches = [num(&pair[2]), num(&pair[3])];
        // The other job has the rest of the GPU.
        let shares = [num(&pair[4]), 100.0 - num(&pair[4])];
        for (i, k) in [(0, 1), (1, 0)] {
            let (service, partner) = (name(i), name(k));
            let layers = IGNITER_LAYERS.iter().find(|(n, _)| *n == partner).unwrap().1.to_vec();
            let of =
                |table: &str, who: usize, model: &str| at(model, table, batches[who], shares[who]);
            let (l2, dram) = (of("l2cache", i, &service), of("dram", i, &service));
            let (other_l2, other_dram) = (of("l2cache", k, &partner), of("dram", k, &partner));
            let share = shares[i] / 100.0;
            let counters = vec![
                l2,
                dram,
                other_l2,
                other_dram,
                l2 * other_l2 / 100.0,
                dram * other_dram / 100.0,
                share,
            ];
            let latency = num(&pair[5 + i]) / 1e3;
            let alone = of("latency", i, &service) / 1e3;
            let pair = Pair { partner, beside: latency, alone, layers, counters };
            sides.push(IgniterSide {
                service,
                batch: batches[i],
                partner_batch: batches[k],
                share,
                pair,
            });
        }
    }
    sides
}

/// The published form: predicts the four parameters of each curve from the layers of the co-located
/// job and the batch size, with one model per service and parameter. Relative errors of the
/// parameters, then of the latencies.
fn as_published(sides: &[IgniterSide]) -> ([Vec<f64>; 4], Vec<f64>) {
    type Key = (String, String, u64, u64);
    let mut by_curve: BTreeMap<Key, Vec<&IgniterSide>> = BTreeMap::new();
    for side in sides {
        let key = (
            side.service.clone(),
            side.pair.partner.clone(),
            side.batch as u64,
            side.partner_batch as u64,
        );
        by_curve.entry(key).or_default().push(side);
    }
    let fitted: Vec<(Key, TwoLines, &Vec<&IgniterSide>)> = by_curve
        .iter()
        .filter_map(|(key, of)| {
            let mut points: Vec<Point> = of.iter().map(|s| (s.share, s.pair.beside)).collect();
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            Some((key.clone(), TwoLines::fit(&points)?, of))
        })
        .collect();
    let parameters = |l: &TwoLines| [l.steep, l.flat, l.knee, l.level];
    let mut errors: [Vec<f64>; 4] = <_>::default();
    let mut latency = Vec::new();
    let names: Vec<&str> = IGNITER_LAYERS.iter().map(|l| l.0).collect();
    for (service, left_out) in names.iter().flat_map(|s| names.iter().map(move |p| (*s, *p))) {
        let mine = || fitted.iter().filter(move |(key, ..)| key.0 == service);
        let features = |of: &[&IgniterSide]| {
            let mut x = of[0].pair.layers.clone();
            x.push(of[0].batch.ln());
            x
        };
        let model = |i: usize| {
            let kept = mine().filter(|(key, ..)| key.1 != left_out);
            let rows: Vec<Row> = kept
                .map(|(key, lines, of)| Row {
                    x: features(of),
                    y: parameters(lines)[i],
                    group: names.iter().position(|n| *n == key.1).unwrap() as u32,
                })
                .collect();
            Pool::fit(&rows).unwrap()
        };
        if service == left_out {
            continue;
        }
        let models = [0, 1, 2, 3].map(model);
        for (_, lines, of) in mine().filter(|(key, ..)| key.1 == left_out) {
            let [steep, flat, knee, level] = [0, 1, 2, 3].map(|i| models[i].predict(&features(of)));
            for (i, predicted) in [steep, flat, knee, level].into_iter().enumerate() {
                let truth = parameters(lines)[i];
                if truth.abs() > 1e-6 {
                    errors[i].push((predicted - truth).abs() / truth.abs());
                }
            }
            let predicted = TwoLines { knee, level, steep, flat };
            latency.extend(
                of.iter().map(|s| (predicted.at(s.share) - s.pair.beside).abs() / s.pair.beside),
            );
        }
    }
    (errors, latency)
}

/// Services beside a training job on the H200: median latency relative to a batch alone.
fn h200() -> Vec<Pair> {
    let solo = json_lines(include_str!("../../../profiles/h200.jsonl"));
    let models = json_lines(include_str!("../../../profiles/models.jsonl"));
    let find = |kind: &str, name: &Value, batch: &Value, sms: f64| {
        let is = |r: &&Value| {
            r["kind"] == kind && r["name"] == *name && r["batch"] == *batch && num(&r["sms"]) == sms
        };
        solo.iter().find(is).unwrap_or_else(|| panic!("{kind} {name} {batch} {sms}"))
    };
    let rows = json_lines(include_str!("../../../profiles/h200-pairs.jsonl"));
    let pairs = rows.iter().filter(|r| r["k"] == "ts").map(|r| {
        let share = num(&r["sms_b"]) / 132.0;
        let alone = 1.0 / num(&find("serve", &r["b"], &r["batch_b"], num(&r["sms_b"]))["it_s"]);
        let service = &find("serve", &r["b"], &r["batch_b"], 132.0)["gpm"];
        let training = &find("train", &r["a"], &r["batch_a"], 132.0)["gpm"];
        let model = models.iter().find(|m| m["kind"] == "train" && m["name"] == r["a"]).unwrap();
        let layers = ["conv", "linear", "attention", "norm", "embedding", "recurrent"];
        let of = |gpm: &Value| ["graphics", "sm_util", "dram"].map(|c| num(&gpm[c]) / 100.0);
        let (s, t) = (of(service), of(training));
        // Load of the service if it ran alone: at a busy service requests queue.
        let load = num(&r["rate_b"]) * alone;
        let launches = num(&training["pcie_rx_mib_s"]).max(1.0).ln();
        let counters = vec![
            load,
            load / (1.05 - load).max(0.05),
            share,
            s[2],
            t[0],
            t[1],
            t[2],
            t[1] / t[0],
            s[2] * t[2],
            launches,
        ];
        let mut counts: Vec<f64> = layers.map(|l| num(&model[l])).into();
        counts.extend([load, load / (1.05 - load).max(0.05)]);
        Pair {
            partner: r["a"].to_string(),
            beside: num(&r["rb"]["p50_ms"]) / 1e3,
            alone,
            layers: counts,
            counters,
        }
    });
    pairs.collect()
}

/// Closed loop on the H200, where a service answers one batch after the other beside a training
/// job: median time of a batch relative to the same alone, in the same session.
fn closed_loop() -> Vec<Pair> {
    let solo = json_lines(include_str!("../../../profiles/h200.jsonl"));
    let rows = json_lines(include_str!("../../../profiles/h200-curves.jsonl"));
    let models = json_lines(include_str!("../../../profiles/models.jsonl"));
    let counters = |kind: &str, name: &Value, batch: &Value| {
        let is = |r: &&Value| {
            r["kind"] == kind && r["name"] == *name && r["batch"] == *batch && r["sms"] == 132
        };
        let gpm = &solo.iter().find(is).unwrap_or_else(|| panic!("{kind} {name} {batch}"))["gpm"];
        let launches = num(&gpm["pcie_rx_mib_s"]).max(1.0).ln();
        (["graphics", "sm_util", "dram"].map(|c| num(&gpm[c]) / 100.0), launches)
    };
    let pair = |r: &Value| {
        let is = |s: &&Value| {
            let same = s["kind"] == "serve" && s["name"] == r["b"];
            same && s["batch"] == r["batch_b"] && s["sms"] == r["sms_b"]
        };
        let alone = num(&rows.iter().find(is)?["p50_ms"]) / 1e3;
        let (s, _) = counters("serve", &r["b"], &r["batch_b"]);
        let (t, launches) = counters("train", &r["a"], &r["batch_a"]);
        let model = models.iter().find(|m| m["kind"] == "train" && m["name"] == r["a"]).unwrap();
        let share = num(&r["sms_b"]) / 132.0;
        let batch = num(&r["batch_b"]).ln();
        let layers = ["conv", "linear", "attention", "norm", "embedding", "recurrent"];
        let mut layers: Vec<f64> = layers.map(|l| num(&model[l])).into();
        layers.push(batch);
        let products = [s[2] * t[2], s[1] * t[1]];
        let mut features = vec![batch, share, launches, s[0], s[1], s[2], t[0], t[1], t[2]];
        features.extend(products);
        let beside = num(&r["rb"]["p50_ms"]) / 1e3;
        Some(Pair { partner: r["a"].to_string(), beside, alone, layers, counters: features })
    };
    rows.iter().filter(|r| r["k"] == "tc").filter_map(pair).collect()
}

/// Tally's two services beside six training jobs under MPS.
fn tally(shared: &Path) -> Vec<Pair> {
    let rows = |path: &str| -> Vec<BTreeMap<String, String>> {
        let text = text(&shared.join(path));
        let mut lines = text.lines();
        let header: Vec<&str> = lines.next().unwrap().split(',').collect();
        let row = |line: &str| {
            header.iter().map(|h| (*h).to_owned()).zip(line.split(',').map(String::from)).collect()
        };
        lines.map(row).collect()
    };
    let solo = rows("traces/tally/single_job_perf.csv");
    let mut pairs: BTreeMap<(String, String), Pair> = BTreeMap::new();
    for row in rows("traces/tally/priority_aware_perf.csv.gz") {
        let (service, partner) = (row["high_priority_job"].clone(), row["best_effort_job"].clone());
        let counter = |job: &str, of: &str| {
            let found = solo.iter().find(|s| s["exp_key"] == job).unwrap();
            found[of].parse::<f64>().unwrap() / 100.0
        };
        let number = |of: &str| row[of].parse::<f64>().unwrap();
        let mine = [counter(&service, "gpu_util"), counter(&service, "mem_util")];
        let other = [counter(&partner, "gpu_util"), counter(&partner, "mem_util")];
        let pair = Pair {
            beside: number("high_priority_mps_avg_latency"),
            alone: number("high_priority_orig_avg_latency"),
            layers: vec![],
            counters: vec![mine[1], other[0], other[1], mine[1] * other[1]],
            partner: partner.clone(),
        };
        pairs.insert((service, partner), pair);
    }
    pairs.into_values().collect()
}

fn predictor_table(shared: &Path) -> String {
    let mut table = String::from(
        "| data | predictor | latencies | mean | median | 90th percentile |\n\
         |---|---|---|---|---|---|\n",
    );
    let mut line = |data: &str, how: &str, mut errors: Vec<f64>| {
        errors.sort_by(f64::total_cmp);
        let at = |q: f64| errors[((q * errors.len() as f64) as usize).min(errors.len() - 1)];
        let [mean, median, p90] =
            [mean(&errors).unwrap(), at(0.5), at(0.9)].map(|e| format!("{e:.3}"));
        writeln!(table, "| {data} | {how} | {} | {mean} | {median} | {p90} |", errors.len())
            .unwrap();
    };
    let sides = igniter(shared);
    let (parameters, latencies) = as_published(&sides);
    let data = "iGniter, 4 services, a partner left out";
    line(data, "published form: four parameters from layers and batch", latencies);
    let pairs: Vec<Pair> = sides.into_iter().map(|s| s.pair).collect();
    line(
        data,
        "as long as alone",
        pairs.iter().map(|p| (p.alone - p.beside).abs() / p.beside).collect(),
    );
    line(data, "times alone, from layers", unseen(&pairs, |p| p.layers.clone()));
    line(data, "times alone, from counters (ours)", unseen(&pairs, |p| p.counters.clone()));
    for (data, pairs) in [
        ("H200, open loop, 6 services, 12 training tasks, one left out", h200()),
        ("H200, closed loop, the same, second session", closed_loop()),
        ("Tally, 2 services, 6 training tasks, one left out", tally(shared)),
    ] {
        line(
            data,
            "as long as alone",
            pairs.iter().map(|p| (p.alone - p.beside).abs() / p.beside).collect(),
        );
        if pairs.iter().all(|p| !p.layers.is_empty()) {
            line(data, "times alone, from layers", unseen(&pairs, |p| p.layers.clone()));
        }
        line(data, "times alone, from counters (ours)", unseen(&pairs, |p| p.counters.clone()));
    }
    let [steep, flat, knee, level] = parameters.map(|e| {
        let mut e = e;
        e.sort_by(f64::total_cmp);
        format!("{:.2}", mean(&e).unwrap())
    });
    writeln!(
        table,
        "\nMean relative errors of the four parameters in the published form: k1 {steep}, \
         k2 {flat}, D0 {knee}, l0 {level}."
    )
    .unwrap();
    table
}

/// Replaces the table between the page's markers.
fn with_block(page: &str, name: &str, table: &str) -> String {
    let (open, close) = (format!("<!-- {name} -->\n"), format!("<!-- /{name} -->\n"));
    let (before, rest) = page.split_once(&open).unwrap_or_else(|| panic!("fits.md lacks {open}"));
    let (_, after) = rest.split_once(&close).unwrap_or_else(|| panic!("fits.md lacks {close}"));
    format!("{before}{open}{table}{close}{after}")
}

#[test]
fn fits_are_as_documented() {
    let Some(shared) = shared() else { return };
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/fits.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let page_now = with_block(&page, "latency curves", &curve_table(&shared));
    let page_now = with_block(&page_now, "latency predictors", &predictor_table(&shared));
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        std::fs::write(&path, &page_now).unwrap();
        return;
    }
    assert_eq!(page, page_now, "UPDATE_EXPECT=1 refreshes docs/reference/fits.md");
}
