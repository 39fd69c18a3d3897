//! What a model will use of a GPU, predicted from its architecture before it has ever run.
//!
//! Trained on measurements of some models (`profiles/h200.jsonl`) joined with features of their
//! architectures (`profiles/models.jsonl`). Utilisation comes from boosted trees over the
//! logarithm, as in Horus; memory from a sum of three parts whose weights are fitted. The error on
//! unseen models is measured by leaving out one task at a time, and every prediction carries that
//! error.

use crate::math::boost::{Boost, Options};
use crate::measurement::rows::{self, Gpm, TaskKind};
use crate::profile::Predicted;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Why a predictor cannot be trained.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PredictError {
    /// A line of the data cannot be read.
    #[error("could not read {which} line {line}: {what}")]
    Line {
        /// Which of the two files.
        which: &'static str,
        /// The line, from 1.
        line: usize,
        /// What is wrong with it.
        what: String,
    },
    /// Measurements of a model without features, or of fewer than two models.
    #[error("nothing to learn from: {0}")]
    Data(String),
}

/// The architecture of a model: amounts for the forward pass of one sample.
#[derive(Clone, Debug, Deserialize)]
struct Model {
    name: String,
    kind: TaskKind,
    aliases: Vec<String>,
    flops: f64,
    params: f64,
    act_bytes: f64,
    attention: f64,
    /// Number of operators, and so of kernels to launch.
    ops: f64,
}

/// What was measured of a model on the whole GPU.
#[derive(Clone, Copy, Debug)]
struct Measured {
    batch: u32,
    mem_mib: f64,
    gpm: Gpm,
}

/// The properties of a GPU model that predictions use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Device {
    /// Number of streaming multiprocessors (SMs).
    pub sms: f64,
    /// Peak of half-precision matrix arithmetic, FLOP/s.
    pub peak_flop_s: f64,
    /// Peak memory bandwidth, bytes/s.
    pub peak_bytes_s: f64,
}

impl Device {
    /// The GPU model of the measurements.
    pub const H200: Self = Self::new(132.0, 989.0, 4800.0);

    const fn new(sms: f64, tflop_s: f64, gb_s: f64) -> Self {
        Self { sms, peak_flop_s: tflop_s * 1e12, peak_bytes_s: gb_s * 1e9 }
    }

    /// The GPU model with this name, from the vendor's data sheets; the reference GPU (a V100) if
    /// unknown.
    pub fn of_kind(name: &str) -> Self {
        match name {
            "k80" => Self::new(13.0, 4.1, 240.0),
            "p100" => Self::new(56.0, 21.0, 732.0),
            "t4" => Self::new(40.0, 65.0, 320.0),
            "a100" => Self::new(108.0, 312.0, 1555.0),
            "h100" => Self::new(132.0, 989.0, 3350.0),
            "h200" => Self::H200,
            _ => Self::new(80.0, 125.0, 900.0),
        }
    }
}

/// Host time to launch a kernel in a training loop, seconds; sets only the scale of the features.
const LAUNCH_S: f64 = 5e-6;
/// Forward once, backward twice.
const PASSES: f64 = 3.0;
/// Single-precision weight, gradient and momentum, read and written by the optimizer.
const UPDATE_BYTES: f64 = 16.0;
const FEATURES: usize = 5;
/// Few rows: small steps of deep trees did best on tasks left out (docs/reference/predictor.md).
const TREES: Options = Options { trees: 60, depth: 3, rate: 0.1, min_leaf: 2 };
const MIB: f64 = 1_048_576.0;

impl Model {
    /// GPU time at peak rates per second of host time for launches, for compute, memory traffic and
    /// weight updates: below 1 the GPU waits for the host.
    fn features(&self, batch: u32, device: &Device) -> [f64; FEATURES] {
        let batch = f64::from(batch);
        let launch_s = PASSES * self.ops * LAUNCH_S;
        let compute_s = PASSES * self.flops * batch / device.peak_flop_s;
        let update_s = UPDATE_BYTES * self.params / device.peak_bytes_s;
        let traffic_s = PASSES * self.act_bytes * batch / device.peak_bytes_s + update_s;
        let per_sm = self.act_bytes * batch / (self.ops * device.sms);
        [
            (compute_s / launch_s).ln(),
            (traffic_s / launch_s).ln(),
            (update_s / launch_s).ln(),
            per_sm.ln(),
            self.attention,
        ]
    }

    /// Components of GPU memory: context, weights with gradients and momenta, activations; MiB.
    fn memory_parts(&self, batch: u32) -> [f64; 3] {
        [1.0, 12.0 * self.params / MIB, self.act_bytes * f64::from(batch) / MIB]
    }
}

/// All fitted models.
#[derive(Clone, Debug)]
struct Fitted {
    sm: Boost,
    dram: Boost,
    /// Weights of [`Model::memory_parts`].
    memory: [f64; 3],
}

/// Training data: a model, its batch, and what was measured.
type Row<'a> = (&'a Model, Measured);

impl Fitted {
    fn new(rows: &[Row<'_>], device: &Device) -> Self {
        let features: Vec<_> = rows.iter().map(|(m, r)| m.features(r.batch, device)).collect();
        let features: Vec<&[f64]> = features.iter().map(<[f64; FEATURES]>::as_slice).collect();
        let fit = |value: fn(&Gpm) -> f64| {
            let targets: Vec<f64> = rows.iter().map(|(_, r)| value(&r.gpm).ln_1p()).collect();
            Boost::fit(&features, &targets, TREES)
        };
        let parts: Vec<_> =
            rows.iter().map(|(m, r)| (m.memory_parts(r.batch), r.mem_mib)).collect();
        Self { sm: fit(|g| g.sm_util), dram: fit(|g| g.dram), memory: weigh(&parts) }
    }

    fn memory_mib(&self, model: &Model, batch: u32) -> f64 {
        let parts = model.memory_parts(batch);
        parts.iter().zip(self.memory).map(|(part, weight)| part * weight).sum()
    }
}

/// Weights of three components with the least relative squared error.
fn weigh(rows: &[([f64; 3], f64)]) -> [f64; 3] {
    // The normal equations, with the right-hand side as a fourth column.
    let mut a = [[0.0; 4]; 3];
    for (parts, whole) in rows {
        for i in 0..3 {
            for (j, of) in parts.iter().chain([whole]).enumerate() {
                a[i][j] += parts[i] * of / (whole * whole);
            }
        }
    }
    for i in 0..3 {
        // Two components that are always proportional cannot be distinguished: one of them counts
        // for both.
        if a[i][i] <= 1e-12 {
            continue;
        }
        let pivot = a[i].map(|v| v / a[i][i]);
        for (k, row) in a.iter_mut().enumerate() {
            let factor = row[i];
            for (value, p) in row.iter_mut().zip(pivot) {
                *value = if k == i { p } else { *value - factor * p };
            }
        }
    }
    a.map(|row| row[3])
}

/// Errors of predictions for tasks that were left out of the training.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// One line per task.
    pub tasks: Vec<(String, Errors)>,
    /// All rows together.
    pub all: Errors,
    /// All rows, with the mean of the other tasks as the prediction.
    pub baseline: Errors,
}

/// Errors over some rows.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct Errors {
    /// Root of the mean squared error of log(1 + utilisation in percent).
    pub sm_rmsle: f64,
    /// Mean absolute error in percentage points.
    pub sm_points: f64,
    /// As `sm_rmsle`, for the memory bandwidth.
    pub dram_rmsle: f64,
    /// As `sm_points`, for the memory bandwidth.
    pub dram_points: f64,
    /// Mean absolute relative error of memory.
    pub mem_relative: f64,
    /// Root of the mean squared relative error of memory.
    pub mem_relative_rms: f64,
}

/// Logarithms of SM utilisation and bandwidth, and memory: predicted, then measured.
type Pair = ([f64; 3], [f64; 3]);

impl Errors {
    fn of(pairs: &[Pair]) -> Self {
        let mean = |error: &dyn Fn(&Pair) -> f64| {
            pairs.iter().map(error).sum::<f64>() / pairs.len().max(1) as f64
        };
        let rmsle = |i: usize| mean(&|(p, m)| (p[i] - m[i]).powi(2)).sqrt();
        let points = |i: usize| mean(&|(p, m)| (p[i].exp() - m[i].exp()).abs());
        Self {
            sm_rmsle: rmsle(0),
            sm_points: points(0),
            dram_rmsle: rmsle(1),
            dram_points: points(1),
            mem_relative: mean(&|(p, m)| (p[2] / m[2] - 1.0).abs()),
            mem_relative_rms: mean(&|(p, m)| (p[2] / m[2] - 1.0).powi(2)).sqrt(),
        }
    }
}

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sm_rmsle, sm_points, dram_rmsle, dram_points, mem_relative, .. } = self;
        let memory = mem_relative * 100.0;
        write!(
            f,
            "{sm_rmsle:.3} | {sm_points:.1} | {dram_rmsle:.3} | {dram_points:.1} | {memory:.1} %"
        )
    }
}

impl fmt::Display for Report {
    /// A table in Markdown.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "| left out | SM RMSLE | SM points | DRAM RMSLE | DRAM points | memory |")?;
        writeln!(f, "|---|---|---|---|---|---|")?;
        for (task, errors) in &self.tasks {
            writeln!(f, "| {task} | {errors} |")?;
        }
        writeln!(f, "| **all** | {} |", self.all)?;
        writeln!(f, "| mean of the others | {} |", self.baseline)
    }
}

/// A trained predictor.
#[derive(Clone, Debug)]
pub struct ResourcePredictor {
    models: Vec<Model>,
    /// Normalised names and aliases of models with training measurements.
    names: BTreeMap<String, usize>,
    fitted: Fitted,
    report: Report,
}

impl ResourcePredictor {
    /// Trains on measurements and features, both JSON Lines.
    pub fn train(measured: &str, models: &str) -> Result<Self, PredictError> {
        let models = read(models)?;
        let measured = rows::parse(measured).map_err(|e| PredictError::Line {
            which: "measurements",
            line: e.line,
            what: e.what,
        })?;
        let device = Device::H200;
        let mut rows: Vec<Row<'_>> = Vec::new();
        for row in &measured {
            let rows::Row::Solo(solo) = row else { continue };
            let whole = solo.kind == TaskKind::Train && f64::from(solo.sms) == device.sms;
            let Some(gpm) = solo.gpm.filter(|_| whole) else { continue };
            let model = models.iter().find(|m| m.kind == solo.kind && m.name == solo.name);
            let model = model
                .ok_or_else(|| PredictError::Data(format!("{} has no features", solo.name)))?;
            rows.push((model, Measured { batch: solo.batch, mem_mib: solo.mem_mib, gpm }));
        }
        let report = cross_validate(&rows, &device)?;
        let fitted = Fitted::new(&rows, &device);
        let names = names(&models);
        Ok(Self { models, names, fitted, report })
    }

    /// Errors on tasks that were left out of the training.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// Predicted GPU usage of training this model; `None` if its architecture or batch size is
    /// unknown.
    pub fn predict(&self, model: &str, batch: u32, device: &Device) -> Option<Predicted> {
        let model = &self.models[*self.names.get(&plain(model))?];
        if batch == 0 {
            return None;
        }
        let features = model.features(batch, device);
        let share = |log: f64| (log.exp_m1() / 100.0).clamp(0.01, 1.0);
        let sm = self.fitted.sm.predict(&features);
        let errors = &self.report.all;
        let (sm_util, sm_util_max) = (share(sm), share(sm + errors.sm_rmsle));
        let memory = self.fitted.memory_mib(model, batch) * (1.0 + errors.mem_relative_rms);
        Some(Predicted {
            sm_util: rounded(sm_util),
            sm_util_max: rounded(sm_util_max),
            std: rounded((sm.exp() * errors.sm_rmsle.exp_m1() / 100.0).min(1.0)),
            dram_util: rounded(share(self.fitted.dram.predict(&features))),
            mem_mib: memory.clamp(1.0, f64::from(u32::MAX)) as u32,
        })
    }
}

/// Four digits exceed the accuracy, and hide the last bit in which machines differ.
fn rounded(share: f64) -> f64 {
    (share * 1e4).round() / 1e4
}

/// A name without case, punctuation and bracketed parts: `ResNet-50 (batch size 32)` is `resnet50`.
fn plain(name: &str) -> String {
    let name = name.split('(').next().unwrap_or_default();
    name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
}

fn names(models: &[Model]) -> BTreeMap<String, usize> {
    let mut names = BTreeMap::new();
    for (i, model) in models.iter().enumerate().filter(|(_, m)| m.kind == TaskKind::Train) {
        for name in model.aliases.iter().chain([&model.name]) {
            names.insert(plain(name), i);
        }
    }
    names
}

fn read(text: &str) -> Result<Vec<Model>, PredictError> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let parse = |(i, line): (usize, &str)| {
        let wrong = |what| PredictError::Line { which: "models", line: i + 1, what };
        serde_json::from_str(line).map_err(|e| wrong(e.to_string()))
    };
    lines.map(parse).collect()
}

/// Predicts each task from all others.
fn cross_validate(rows: &[Row<'_>], device: &Device) -> Result<Report, PredictError> {
    let tasks: BTreeSet<&str> = rows.iter().map(|(m, _)| m.name.as_str()).collect();
    if tasks.len() < 2 {
        return Err(PredictError::Data("fewer than two tasks were measured".into()));
    }
    let truth = |r: &Measured| [r.gpm.sm_util.ln_1p(), r.gpm.dram.ln_1p(), r.mem_mib];
    let mut report = (Vec::new(), Vec::new(), Vec::new());
    for task in tasks {
        let (out, others): (Vec<Row<'_>>, Vec<Row<'_>>) =
            rows.iter().partition(|(m, _)| m.name == task);
        let fitted = Fitted::new(&others, device);
        let predicted = |(m, r): &Row<'_>| {
            let x = m.features(r.batch, device);
            let guess =
                [fitted.sm.predict(&x), fitted.dram.predict(&x), fitted.memory_mib(m, r.batch)];
            (guess, truth(r))
        };
        let pairs: Vec<Pair> = out.iter().map(predicted).collect();
        let sums = others.iter().map(|(_, r)| truth(r)).fold([0.0; 3], |mut sum, t| {
            sum.iter_mut().zip(t).for_each(|(s, v)| *s += v);
            sum
        });
        let mean = sums.map(|s| s / others.len() as f64);
        report.0.push((task.to_string(), Errors::of(&pairs)));
        report.2.extend(out.iter().map(|(_, r)| (mean, truth(r))));
        report.1.extend(pairs);
    }
    let (tasks, all, baseline) = report;
    Ok(Report { tasks, all: Errors::of(&all), baseline: Errors::of(&baseline) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use expect_test::expect;

    const MEASURED: &str = include_str!("../../../../profiles/h200.jsonl");
    const MODELS: &str = include_str!("../../../../profiles/models.jsonl");
    /// The page that quotes the table.
    const PAGE: &str = include_str!("../../../../docs/reference/predictor.md");

    fn predictor() -> ResourcePredictor {
        ResourcePredictor::train(MEASURED, MODELS).unwrap()
    }

    #[test]
    fn errors_on_tasks_left_out_are_as_documented() {
        let report = predictor().report().clone();
        let table = report.to_string();
        assert!(
            PAGE.contains(&table),
            "docs/reference/predictor.md has other numbers than\n{table}"
        );
        assert!(report.all.sm_rmsle < report.baseline.sm_rmsle);
        assert!(report.all.dram_rmsle < report.baseline.dram_rmsle);
        assert!(report.all.mem_relative < report.baseline.mem_relative);
    }

    #[test]
    fn predictions_for_models_in_traces() {
        let predictor = predictor();
        let shown = |model: &str, batch: u32, gpu: &str| {
            let p = predictor.predict(model, batch, &Device::of_kind(gpu)).unwrap();
            let percent = |v: f64| (v * 100.0).round();
            let (sm, max, dram) =
                (percent(p.sm_util), percent(p.sm_util_max), percent(p.dram_util));
            format!("{model} {batch} {gpu}: {sm} to {max} %, dram {dram} %, {} MiB\n", p.mem_mib)
        };
        let mut text = String::new();
        for (model, batch) in
            [("vgg16", 16), ("resnet18", 128), ("bert", 4), ("gpt2", 4), ("dqn", 128)]
        {
            text += &shown(model, batch, "h200");
            text += &shown(model, batch, "v100");
        }
        expect![[r#"
            vgg16 16 h200: 92 to 100 %, dram 5 %, 4498 MiB
            vgg16 16 v100: 100 to 100 %, dram 6 %, 4498 MiB
            resnet18 128 h200: 70 to 100 %, dram 20 %, 3268 MiB
            resnet18 128 v100: 82 to 100 %, dram 30 %, 3268 MiB
            bert 4 h200: 35 to 54 %, dram 10 %, 3581 MiB
            bert 4 v100: 82 to 100 %, dram 7 %, 3581 MiB
            gpt2 4 h200: 46 to 70 %, dram 17 %, 6098 MiB
            gpt2 4 v100: 99 to 100 %, dram 5 %, 6098 MiB
            dqn 128 h200: 23 to 35 %, dram 2 %, 1179 MiB
            dqn 128 v100: 30 to 46 %, dram 9 %, 1179 MiB
        "#]]
        .assert_eq(&text);
    }

    #[test]
    fn names_are_found_in_any_spelling() {
        let predictor = predictor();
        let of = |name| predictor.predict(name, 64, &Device::H200);
        assert!(of("resnet50").is_some());
        assert_eq!(of("resnet50"), of("ResNet-50 (batch size 64)"));
        assert_eq!(of("resnet50"), of("resnet50-imagenet"));
        assert_eq!(of("shufflenet"), of("ShuffleNet_v2_x1_0"));
    }

    #[test]
    fn what_is_not_known_is_not_guessed() {
        let predictor = predictor();
        assert_eq!(predictor.predict("mystery-net", 64, &Device::H200), None);
        assert_eq!(predictor.predict("resnet50", 0, &Device::H200), None);
        assert_eq!(
            predictor.predict("yolos-tiny", 64, &Device::H200),
            None,
            "only served, never trained"
        );
    }

    #[test]
    fn predictions_are_shares() {
        let predictor = predictor();
        for name in predictor.names.keys() {
            for batch in [1, 64, 1 << 20] {
                let p = predictor.predict(name, batch, &Device::of_kind("t4")).unwrap();
                assert!(p.sm_util > 0.0 && p.sm_util <= p.sm_util_max && p.sm_util_max <= 1.0);
                assert!((0.0..=1.0).contains(&p.dram_util) && p.mem_mib > 500, "{name} {p:?}");
            }
        }
    }

    #[test]
    fn bad_data_is_named() {
        let tell = |measured: &str, models: &str| {
            ResourcePredictor::train(measured, models)
                .err()
                .map(|e| e.to_string())
                .unwrap_or_default()
        };
        assert!(tell("", MODELS).contains("fewer than two tasks"));
        assert!(tell(MEASURED, "").contains("has no features"));
        assert!(tell("{}", MODELS).starts_with("could not read measurements line 1"));
    }
}
