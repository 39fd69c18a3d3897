//! Reads a trace or scenario once and simulates policies on it.

use crate::atomic::AtomicFile;
use crate::cli::{self, TraceInput, WorldArgs};
use crate::external::{self, EXTERNAL, External};
use crate::{console, measurements, table};
use anyhow::Context;
use roommate_core::cluster::Cluster;
use roommate_core::interference;
use roommate_core::interference::noisy::Noisy;
use roommate_core::interference::table::Table;
use roommate_core::job::Retries;
use roommate_core::journal::metrics::{Fold, Metrics};
use roommate_core::journal::{Observer, Writer};
use roommate_core::measurement::atlas::Atlas;
use roommate_core::policy::{self, Entry, Params, Policy};
use roommate_core::state::Costs;
use roommate_core::time::Span;
use roommate_sim::bound::{Bound, bound};
use roommate_sim::compat::{self, Compat};
use roommate_sim::fault::Faults;
use roommate_sim::scenario::score::Outcome;
use roommate_sim::scenario::{Contender, SampledWorkload, Scenario};
use roommate_sim::serving::Measuring;
use roommate_sim::trace::{self, ReadOptions, Trace, TraceJob, synth};
use roommate_sim::truth::{self, Truth};
use roommate_sim::workload::{self, Measurements, Setting, Unfit, Workload};
use roommate_sim::world::{Setup, simulate};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// A workload and the options of its simulation.
pub(crate) struct Lab {
    workload: Workload,
    world: WorldArgs,
    compat: Option<&'static Compat>,
    truth: Truth,
    /// Throughput table with pair speeds, if any.
    throughputs: Option<PathBuf>,
    /// Number of jobs without a model that were assigned a measured task.
    stand_ins: u64,
    source: String,
    format: String,
    dropped: u64,
    /// GPU seconds of all training at full SM utilisation; 0 except for scenarios.
    sm_s: f64,
}

/// The result of one policy.
pub(crate) struct Run {
    pub(crate) policy: String,
    pub(crate) metrics: Metrics,
    wall_s: f64,
}

/// A policy with valid parameters, checked before any file is read or written.
pub(crate) struct Choice {
    entry: &'static Entry,
    params: Params,
}

impl Choice {
    /// The policy of this name with the parameters of a compat mode, if one is given, and then with
    /// these `name=value` pairs.
    pub(crate) fn new(name: &str, compat: Option<&str>, set: &[&str]) -> anyhow::Result<Self> {
        let entry = policy::find(name)?;
        let mut params = compat.map_or(Ok(Params::new()), |c| entry.compat_params(c))?;
        let given = set.iter().map(|pair| param(pair)).collect::<anyhow::Result<Vec<_>>>()?;
        params.extend(given.iter().cloned());
        if let Err(wrong) = entry.build(&params) {
            // If one pair is invalid by itself, the error names it.
            for (pair, param) in set.iter().zip(given) {
                let alone = entry.build(&Params::from_iter([param]));
                alone.with_context(|| format!("--set {pair:?}"))?;
            }
            return Err(wrong.into());
        }
        Ok(Self { entry, params })
    }

    /// A policy of a scenario, with these `name=value` pairs.
    pub(crate) fn of_scenario(contender: &Contender, set: &[&str]) -> anyhow::Result<Self> {
        let mut choice = Self::new(&contender.name, None, set)?;
        let given = std::mem::replace(&mut choice.params, contender.params.clone());
        choice.params.extend(given);
        choice.entry.build(&choice.params)?;
        Ok(choice)
    }

    /// Parameters that differ from the defaults.
    pub(crate) fn params(&self) -> &Params {
        &self.params
    }

    /// Whether the policy has to know how long jobs take.
    pub(crate) fn knows_durations(&self) -> bool {
        self.entry.knows_durations
    }

    /// The name of the policy.
    pub(crate) fn name(&self) -> &'static str {
        self.entry.name
    }
}

/// Parses a `name=value` pair; a value that is not JSON is a string.
pub(crate) fn param(pair: &str) -> anyhow::Result<(String, Value)> {
    let (name, value) = pair.split_once('=').ok_or_else(|| {
        let what = format!("--set {pair:?}: expected NAME=VALUE");
        console::advise(what, "for example --set backfill=true")
    })?;
    let value = serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.into()));
    Ok((name.into(), value))
}

/// The synthetic trace that is used if none is given: about a day and a half, at overload.
const INVENTED_JOBS: usize = 500;
const INVENTED_LOAD: f64 = 1.5;

pub(crate) fn read_trace(path: &Path, input: &TraceInput) -> anyhow::Result<Trace> {
    let options = ReadOptions {
        format: input.format,
        skip_bad_rows: input.skip_bad_rows,
        throughputs: input.throughputs.clone(),
        sensitivity: input.sensitivity.clone(),
        gpu_model: input.gpu_model.clone(),
        max_jobs: input.max_jobs,
    };
    let trace = trace::read(path, &options)?;
    if trace.dropped > 0 {
        let rows = table::count(trace.dropped, "bad row");
        console::say(&format!("dropped {rows}, the first of them:"));
        for error in &trace.first_dropped {
            console::say(&format!("  {error}"));
        }
    }
    for (remark, n) in &trace.remarks {
        console::say(&remark.told(*n));
    }
    if trace.jobs.is_empty() {
        let left_out = trace.remarks.keys().any(|r| r.is_left_out());
        let which = if left_out || trace.dropped > 0 { " that could run" } else { "" };
        anyhow::bail!("trace {:?} has no jobs{which}", path.display().to_string());
    }
    Ok(trace)
}

impl Lab {
    pub(crate) fn new(
        trace: Option<&Path>,
        input: &TraceInput,
        world: &WorldArgs,
    ) -> anyhow::Result<Self> {
        if world.blind && world.truth == "stages" {
            let what = "--blind hides the stages of steps, from which --truth stages is made";
            return Err(console::advise(what, "use --truth measured"));
        }
        let (source, trace) = match trace {
            Some(path) => (path.display().to_string(), read_trace(path, input)?),
            None => ("invented trace".to_string(), invented(world)),
        };
        let (lab, unfit) = Self::of(trace, source, input, world)?;
        if let Some(first) = unfit.first() {
            let jobs = table::count(unfit.len() as u64, "job");
            console::say(&format!("dropped {jobs}, the first: {first}"));
        }
        if lab.workload.arrivals.is_empty() {
            anyhow::bail!("{:?} has no jobs that could run on {}", lab.source, world.cluster);
        }
        Ok(lab)
    }

    /// A trace in memory, in a world; also the jobs that were dropped because the cluster can never
    /// run them.
    pub(crate) fn of(
        mut trace: Trace,
        source: String,
        input: &TraceInput,
        world: &WorldArgs,
    ) -> anyhow::Result<(Self, Vec<Unfit>)> {
        let compat = world.compat.as_deref().and_then(compat::find);
        let own = world.measurements.as_deref().map(measurements::atlas).transpose()?.map(Arc::new);
        let truth = truth(world, input, own.as_ref())?;
        let stand_ins = if compat.is_none() { truth.name_models(&mut trace.jobs) } else { 0 };
        truth.fill_memory(&mut trace.jobs);
        let format = trace.format.to_string();
        let dropped = trace.dropped;
        let retries = Retries {
            user: world.user_retries.unwrap_or(world.retries),
            ..Retries::from(world.retries)
        };
        let setting = Setting {
            cluster: &world.cluster,
            compat,
            measured: own.as_deref().map(|atlas| Measurements { atlas, gpu_model: None }),
            drop_unfit: input.skip_bad_rows,
            retries,
            spread_penalty: !world.no_spread_penalty,
        };
        let (workload, unfit) = workload::prepare(trace.jobs, &setting)?;
        let dropped = dropped + unfit.len() as u64;
        let lab = Self {
            workload,
            world: world.clone(),
            compat,
            truth,
            throughputs: input.throughputs.clone(),
            stand_ins,
            source,
            format,
            dropped,
            sm_s: 0.0,
        };
        Ok((lab, unfit))
    }

    /// The workload of one seed of a scenario.
    pub(crate) fn of_scenario(
        scenario: &Scenario,
        seed: u64,
        atlas: &Arc<Atlas>,
    ) -> anyhow::Result<Self> {
        let SampledWorkload { workload, works, sm_s } = scenario.deal(seed, atlas)?;
        let (defaults, _) = cli::defaults();
        let world = WorldArgs {
            cluster: scenario.cluster.clone(),
            seed,
            truth_noise: scenario.world.noise,
            start_cost: scenario.world.start_s,
            restart_cost: scenario.world.restart_s,
            tune_cost: scenario.world.tune_s,
            service_gate: scenario.world.gate,
            ..defaults
        };
        Ok(Self {
            workload,
            world,
            compat: None,
            truth: Truth::mapped(Arc::clone(atlas), works),
            stand_ins: 0,
            source: scenario.name(),
            format: "scenario".into(),
            throughputs: None,
            dropped: 0,
            sm_s,
        })
    }

    /// The result of a run for the comparison of a scenario.
    pub(crate) fn outcome(&self, run: Run) -> Outcome {
        let gpu_s = run.metrics.makespan_s * f64::from(self.world.cluster.gpus());
        let sm_busy = if gpu_s > 0.0 { self.sm_s / gpu_s } else { 0.0 };
        Outcome { metrics: run.metrics, sm_busy }
    }

    pub(crate) fn jobs(&self) -> usize {
        self.workload.arrivals.len()
    }

    /// Description of the workload and the cluster in one line.
    pub(crate) fn title(&self) -> String {
        let gpus = table::count(self.world.cluster.gpus().into(), "GPU");
        let jobs = table::count(self.jobs() as u64, "job");
        format!("{}: {jobs} on {} ({gpus})", self.source, self.world.cluster)
    }

    /// Simulates a policy; `extra` observes the run, and the journal is written if a path is given.
    pub(crate) fn run(
        &self,
        choice: &Choice,
        journal: Option<&Path>,
        extra: &mut dyn Observer,
        progress: &mut dyn FnMut(u64),
    ) -> anyhow::Result<Run> {
        let Choice { entry, params } = choice;
        let name = entry.name;
        let policy = entry.build(params)?;
        let Value::Object(all_params) = entry.params(params)? else {
            anyhow::bail!("parameters of {name} are not an object");
        };
        self.run_policy(name, all_params, policy, journal, extra, progress)
    }

    /// Simulates a policy that another process decides for; it listens on this socket.
    pub(crate) fn run_external(
        &self,
        socket: &Path,
        journal: Option<&Path>,
        extra: &mut dyn Observer,
        progress: &mut dyn FnMut(u64),
    ) -> anyhow::Result<Run> {
        let names = external::Names {
            jobs: self.workload.arrivals.iter().map(|job| job.name.clone()).collect(),
            profiles: self.workload.profiles.iter().map(|(name, _)| name.clone()).collect(),
        };
        let (policy, failure) = External::connect(socket, names)?;
        let policy = Box::new(policy);
        let run = self.run_policy(EXTERNAL, Params::new(), policy, journal, extra, progress);
        // What the simulation says after the policy has failed is only a consequence.
        failure.take().map_or(run, Err)
    }

    fn run_policy(
        &self,
        name: &str,
        params: Params,
        policy: Box<dyn Policy>,
        journal: Option<&Path>,
        extra: &mut dyn Observer,
        progress: &mut dyn FnMut(u64),
    ) -> anyhow::Result<Run> {
        let (known_pairs, truth) = self.models_for(name)?;
        let setup = Setup {
            cluster: self.world.cluster.clone(),
            costs: self.costs(name),
            policy_name: name.into(),
            params,
            policy,
            known_pairs,
            truth,
            faults: self.faults(),
            seed: self.world.seed,
            profiles: self.workload.profiles.clone(),
            teams: self.workload.teams.clone(),
            measure: self.world.measure.clone(),
            measuring: Measuring {
                window: Span::from_secs(self.world.window),
                exact: self.world.exact_requests,
                gate: self.world.service_gate,
            },
            blind: self.world.blind.then_some(self.world.blind_noise),
        };
        let writer = journal.map(AtomicFile::create).transpose()?.map(Writer::new);
        let mut observers = (Fold::measuring(self.world.measure.clone()), (writer, extra));
        let began = Instant::now();
        let arrivals = self.workload.arrivals.iter().cloned();
        simulate(setup, arrivals, &mut observers, progress)
            .with_context(|| format!("policy {name}"))?;
        let wall_s = began.elapsed().as_secs_f64();
        let (fold, (writer, _)) = observers;
        if let (Some(writer), Some(path)) = (writer, journal) {
            let file = writer.finish();
            file.with_context(|| format!("could not write {}", path.display()))?.keep()?;
        }
        Ok(Run { policy: name.into(), metrics: fold.metrics(), wall_s })
    }

    /// The lower bound on the mean completion time of any policy; `None` without training jobs,
    /// with faults (jobs that are given up do not count), and under the rules of a published
    /// simulator, which count time in their own ways.
    pub(crate) fn bound(&self) -> Option<Bound> {
        if self.compat.is_some() || self.world.crash > 0.0 || self.world.node_mtbf.is_some() {
            return None;
        }
        let (truth, _) = self.truth.model(&self.workload.profiles);
        let noisy = self.world.truth_noise > 0.0;
        bound(&self.workload, &self.world.cluster, &*truth, noisy, self.world.measure.as_ref())
    }

    fn truth_name(&self) -> Option<String> {
        self.compat.is_none().then(|| self.world.truth.clone())
    }

    /// The pair speeds that the policy knows, and the true interference model.
    fn models_for(
        &self,
        policy: &str,
    ) -> anyhow::Result<(Option<Table>, Box<dyn interference::Truth>)> {
        let known = self.compat.filter(|c| c.knows_pairs(policy)).zip(self.throughputs.as_deref());
        if let Some((_, file)) = known {
            let table = self.pairs_in(file)?;
            return Ok((Some(table.clone()), Box::new(table)));
        }
        let known =
            self.world.known_pairs.as_deref().map(|file| self.pairs_in(file)).transpose()?;
        Ok((known, self.truth_for(policy)))
    }

    /// Pair speeds of the profiles of this workload: by GPU model from throughputs, or from a plain
    /// table.
    fn pairs_in(&self, file: &Path) -> anyhow::Result<Table> {
        let names = self.workload.profiles.iter().map(|(name, _)| name.as_str());
        if Some(file) == self.throughputs.as_deref() {
            let models: Vec<&str> =
                self.world.cluster.gpu_models.iter().map(|m| m.name.as_str()).collect();
            let widths = self.workload.widths();
            let profiles: Vec<(&str, u32)> = names.zip(widths.iter().copied()).collect();
            return Ok(trace::pairs::by_gpu_model(file, &models, &profiles)?);
        }
        let pairs = trace::pairs::read(file, self.throughputs.as_deref(), "v100")?;
        Ok(pairs.table(&names.collect::<Vec<_>>()).0)
    }

    /// The true interference model for a run of this policy.
    fn truth_for(&self, policy: &str) -> Box<dyn interference::Truth> {
        if let Some(compat) = self.compat {
            return compat.truth(policy);
        }
        let (model, _) = self.truth.model(&self.workload.profiles);
        let spread = self.world.truth_noise;
        if spread == 0.0 { model } else { Box::new(Noisy { model, spread, seed: self.world.seed }) }
    }

    fn costs(&self, policy: &str) -> Costs {
        let costs = Costs {
            restart: Span::from_secs(self.world.restart_cost),
            start: Span::from_secs(self.world.start_cost),
            resume: Span::from_secs(self.world.resume_cost),
            migrate: self.world.migrate_cost.map(Span::from_secs),
            tune: Span::from_secs(self.world.tune_cost),
            max_tenants: self.world.max_tenants,
            ..Costs::default()
        };
        self.compat.map_or(costs, |c| c.costs(costs, policy))
    }

    fn faults(&self) -> Faults {
        Faults {
            node_mtbf: self.world.node_mtbf.map(|h| Span::from_secs(h * 3_600.0)),
            node_repair: Span::from_secs(self.world.node_repair * 3_600.0),
            crash: self.world.crash,
            user_errors: self.world.user_errors,
            checkpoint: Span::from_secs(self.world.checkpoint * 60.0),
        }
    }

    /// Description of the workload as JSON.
    pub(crate) fn describe(&self) -> Map<String, Value> {
        let about = json!({
            "trace": self.source,
            "format": self.format,
            "dropped_rows": self.dropped,
            "cluster": self.world.cluster.to_string(),
            "gpus": self.world.cluster.gpus(),
            "compat": self.world.compat,
            "truth": self.truth_name(),
            "jobs_without_model": self.stand_ins,
            "seed": self.world.seed,
        });
        match about {
            Value::Object(map) => map,
            _ => Map::new(),
        }
    }
}

impl Run {
    /// Metrics as JSON.
    pub(crate) fn json(&self) -> anyhow::Result<Map<String, Value>> {
        let mut map = Map::new();
        map.insert("policy".into(), self.policy.clone().into());
        if let Value::Object(figures) = serde_json::to_value(&self.metrics)? {
            map.extend(figures);
        }
        map.insert("wall_s".into(), json!(self.wall_s));
        map.insert("peak_rss_mib".into(), json!(console::peak_rss_mib()));
        Ok(map)
    }
}

fn truth(world: &WorldArgs, input: &TraceInput, own: Option<&Arc<Atlas>>) -> anyhow::Result<Truth> {
    let atlas = || match own {
        Some(own) => anyhow::Ok(Arc::clone(own)),
        None => Ok(Arc::new(truth::h200()?)),
    };
    let pairs = || match &world.pairs {
        Some(file) => Ok(trace::pairs::read(file, input.throughputs.as_deref(), &input.gpu_model)?),
        None => Err(anyhow::anyhow!("--truth {} needs --pairs FILE", world.truth)),
    };
    let name = if world.compat.is_some() { "stages" } else { &world.truth };
    let entry = truth::find(name).with_context(|| format!("there is no truth {name:?}"))?;
    entry.build(atlas, pairs)
}

/// All metrics of runs as CSV.
pub(crate) fn csv(runs: &[Run]) -> String {
    let mut text = String::new();
    for (i, run) in runs.iter().enumerate() {
        let rows = run.metrics.rows();
        if i == 0 {
            let keys: Vec<&str> = rows.iter().map(|r| r.key).collect();
            text += &format!("policy,{},events,wall_s\n", keys.join(","));
        }
        let cells: Vec<String> =
            rows.iter().map(|r| r.value.map(|v| v.to_string()).unwrap_or_default()).collect();
        let (events, wall_s) = (run.metrics.events, run.wall_s);
        text += &format!("{},{},{events},{wall_s}\n", run.policy, cells.join(","));
    }
    text
}

/// Limits the memory of synthetic jobs to that of the smallest GPU of the cluster.
pub(crate) fn fitted(cluster: &Cluster) -> impl Fn(TraceJob) -> TraceJob + use<> {
    let memories = cluster.gpu_models.iter().map(|k| k.mem_mib).filter(|m| *m > 0);
    let least = memories.min().unwrap_or(u32::MAX);
    move |job| TraceJob { mem_mib: job.mem_mib.min(least), ..job }
}

/// A synthetic trace, used if none is given.
fn invented(world: &WorldArgs) -> Trace {
    let options = synth::SynthOptions {
        jobs: INVENTED_JOBS,
        seed: world.seed,
        arrivals: synth::Arrivals::Diurnal,
        load: INVENTED_LOAD,
        cluster_gpus: world.cluster.gpus(),
        mix: synth::Mix::Small,
        best_effort: 0.4,
        ..synth::SynthOptions::default()
    };
    // A small sample of a heavy-tailed distribution has less work than its mean; arrivals are
    // accelerated to reach the intended load.
    let probe: Vec<TraceJob> = synth::synth(&options).collect();
    let work: f64 = probe.iter().map(|j| f64::from(j.gpus) * j.duration_s).sum();
    let span_s = probe.last().map_or(1.0, |j| j.submit_us as f64 / 1e6);
    let offered = work / (span_s * f64::from(world.cluster.gpus()));
    let load = (INVENTED_LOAD * INVENTED_LOAD / offered).clamp(0.01, 1000.0);
    let options = synth::SynthOptions { load, ..options };
    Trace {
        jobs: synth::synth(&options).map(fitted(&world.cluster)).collect(),
        format: trace::Format::Roommate,
        dropped: 0,
        first_dropped: Vec::new(),
        origin_s: None,
        remarks: trace::Remarks::new(),
    }
}
