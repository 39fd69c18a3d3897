//! From a trace to the workload of a simulation: names become indices, models become profiles, and
//! jobs that the cluster can never run are found before the simulation starts.

use crate::compat::Compat;
use crate::serving::requests::Requests;
use crate::trace::{TraceClass, TraceJob, TraceService};
use crate::truth;
use crate::world::Arrival;
use roommate_core::cluster::Cluster;
use roommate_core::idx::{Idx, IdxVec, ProfileIdx, TeamIdx};
use roommate_core::job::{Class, Retries, Slo, Spec};
use roommate_core::knobs::Knobs;
use roommate_core::measurement::atlas::Atlas;
use roommate_core::measurement::contention::TaskId;
use roommate_core::measurement::resource_predictor::{Device, ResourcePredictor};
use roommate_core::number::{Number, Positive};
use roommate_core::profile::{Predicted, Profile, Profiled, Serving};
use roommate_core::time::{Span, Time};
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// Jobs with their profiles and teams.
#[derive(Clone, Debug, Default)]
pub struct Workload {
    /// The jobs in order of submission.
    pub arrivals: Vec<Arrival>,
    /// Profiles with their names.
    pub profiles: Vec<(String, Profile)>,
    /// Names of the teams.
    pub teams: Vec<String>,
}

impl Workload {
    /// GPUs of the first job of each profile.
    pub fn widths(&self) -> IdxVec<ProfileIdx, u32> {
        let mut widths: IdxVec<ProfileIdx, u32> = vec![0; self.profiles.len()].into();
        for Arrival { spec, .. } in self.arrivals.iter().rev() {
            widths[spec.profile] = u32::from(spec.gpus);
        }
        widths
    }
}

/// A job that the cluster can never run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("job {name:?} can never run on {cluster}: {what}")]
pub struct Unfit {
    /// The job.
    pub name: String,
    /// The cluster.
    pub cluster: String,
    /// The reason.
    pub what: String,
}

/// Published data of models: share of the largest tensor in all parameters (skew), and speed of a
/// gang of eight that is spread, relative to consolidated. From the Tiresias study (NSDI 2019;
/// speeds read from a figure, ±0.03; values above 1 are measurements of the study).
const MODELS: &[(&str, f32, f64)] = &[
    ("vgg19", 0.715, 0.71),
    ("vgg16", 0.743, 0.73),
    ("vgg11", 0.773, 0.77),
    ("alexnet", 0.610, 0.80),
    ("resnet152", 0.039, 1.04),
    ("resnet101", 0.053, 1.06),
    ("resnet50", 0.092, 1.08),
    ("inception4", 0.036, 1.02),
    ("inception3", 0.086, 1.06),
    ("googlenet", 0.146, 1.07),
];

/// Trained once, when the first job names a model.
static PREDICTOR: LazyLock<ResourcePredictor> = LazyLock::new(|| {
    let measured = include_str!("../../../profiles/h200.jsonl");
    let models = include_str!("../../../profiles/models.jsonl");
    ResourcePredictor::train(measured, models)
        .expect("the profiles that come with the program are sound")
});

/// The measurements that are compiled into the program.
static BUILT_IN: LazyLock<Atlas> =
    LazyLock::new(|| truth::h200().expect("the profiles that come with the program are sound"));

/// Measurements of services, and the GPU model on which they were made.
#[derive(Clone, Copy, Debug)]
pub struct Measurements<'a> {
    /// The measurements.
    pub atlas: &'a Atlas,
    /// The GPU model; none = the first of the cluster.
    pub gpu_model: Option<&'a str>,
}

impl<'a> Measurements<'a> {
    /// Measurements of one H200.
    pub fn of_h200(atlas: &'a Atlas) -> Self {
        Self { atlas, gpu_model: Some("h200") }
    }
}

/// Options for preparing a workload.
#[derive(Clone, Copy, Debug)]
pub struct Setting<'a> {
    /// The cluster.
    pub cluster: &'a Cluster,
    /// The published simulator to reproduce.
    pub compat: Option<&'a Compat>,
    /// Measurements of services, the same as those of the truth; `None` = the built-in ones.
    pub measured: Option<Measurements<'a>>,
    /// Whether jobs that can never run are dropped instead of reported as an error.
    pub drop_unfit: bool,
    /// How often failed jobs are retried.
    pub retries: Retries,
    /// Whether gangs that are spread over nodes are slower than consolidated ones.
    pub spread_penalty: bool,
}

impl<'a> Setting<'a> {
    /// The defaults for a cluster.
    pub fn of(cluster: &'a Cluster) -> Self {
        Self {
            cluster,
            compat: None,
            measured: None,
            drop_unfit: false,
            retries: 3.into(),
            spread_penalty: true,
        }
    }

    fn measured(&self) -> Measurements<'a> {
        self.measured.unwrap_or_else(|| Measurements::of_h200(&BUILT_IN))
    }
}

/// Default of the largest batch of a service.
const SERVICE_BATCH: u32 = 16;
/// Default of the batching time-out as a share of the SLO.
const TIMEOUT_OF_SLO: f64 = 0.1;
/// Default of the batching time-out of a service without an SLO.
const TIMEOUT_MS: f64 = 5.0;
/// Process start, loading of weights and warm-up took 17 to 25 s on the measured H200.
const WARM_UP_S: f64 = 20.0;

/// Speeds of a cluster's GPU models relative to the GPU model of the measurements, instead of the
/// reference GPU. GPUs without a model count as the measured one.
fn relative_speeds(cluster: &Cluster, measured: Option<&str>) -> SmallVec<[(u8, Positive); 2]> {
    let known = measured.map(|name| {
        let one: Cluster = format!("1x1:{name}").parse().expect("a known GPU model");
        one.gpu_models[0].speed
    });
    let measured_speed = known.unwrap_or(cluster.gpu_models[0].speed);
    let is_it = |name: &str| {
        let names = measured.into_iter().flat_map(|m| [m, "gpu"]);
        names.into_iter().any(|n| name.eq_ignore_ascii_case(n))
    };
    let models = (0..).zip(&cluster.gpu_models);
    let speed = |name: &str, speed: f64| if is_it(name) { 1.0 } else { speed / measured_speed };
    models.map(|(i, k)| (i, Positive::of(speed(&k.name, k.speed)))).collect()
}

/// GPU memory of a measured service: constant part and part per request of a batch, by least
/// squares over the measured batch sizes.
fn service_memory(atlas: &Atlas, task: TaskId) -> (f32, f32) {
    let points: Vec<(f64, f64)> = atlas
        .batches(task)
        .map(|b| (f64::from(b), f64::from(atlas.counters(task, b).mem_mib)))
        .collect();
    let n = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / n;
    let (x, y) = (mean(|p| p.0), mean(|p| p.1));
    let (up, down) = points
        .iter()
        .fold((0.0, 0.0), |(u, d), p| (u + (p.0 - x) * (p.1 - y), d + (p.0 - x).powi(2)));
    let item = if down > 0.0 { (up / down).max(0.0) } else { 0.0 };
    ((y - item * x) as f32, item as f32)
}

/// Shares of the GPU at which services were measured, in permille.
const PROFILED_PERMILLE: [u16; 7] = [61, 121, 182, 303, 485, 727, 1000];

/// Latency points that profiling a service alone gives; `None` if its model was not measured.
fn profiled(atlas: &Atlas, job: &TraceJob) -> Option<Box<[Profiled]>> {
    let service = job.service.as_deref()?;
    let task = truth::service(atlas, job.model.as_deref()?)?;
    // A batch time given in the trace scales all measured times.
    let own_s = atlas.batch_s(task, job.batch, None);
    let scale = service.batch_s.map_or(1.0, |s| s / own_s);
    let point = |batch: u32, sm_permille: u16| {
        let sms = (f64::from(sm_permille) / 1e3 * f64::from(atlas.sms())).round() as u32;
        Profiled { batch, sm_permille, seconds: scale * atlas.batch_s(task, batch, Some(sms)) }
    };
    let batches = atlas.batches(task);
    Some(batches.flat_map(|b| PROFILED_PERMILLE.map(|share| point(b, share))).collect())
}

/// Predicted resource use of training this model, on the GPU model of the cluster with the highest
/// SM utilisation.
fn predict(cluster: &Cluster, model: &str, batch: u32) -> Option<Predicted> {
    let on = |gpu_model: &str| PREDICTOR.predict(model, batch, &Device::of_kind(gpu_model));
    let all = cluster.gpu_models.iter().filter_map(|m| on(&m.name));
    all.max_by(|a, b| a.sm_util.total_cmp(&b.sm_util))
}

/// Prepares a workload; also returns the jobs that were dropped.
pub fn prepare(
    jobs: Vec<TraceJob>,
    setting: &Setting<'_>,
) -> Result<(Workload, Vec<Unfit>), Unfit> {
    let mut maker = Maker {
        setting,
        workload: Workload::default(),
        profiles: BTreeMap::new(),
        kinds: BTreeMap::new(),
        predicted: BTreeMap::new(),
        teams: BTreeMap::new(),
    };
    let mut dropped = Vec::new();
    for job in jobs {
        match maker.admit(job) {
            Ok(()) => {}
            Err(unfit) if setting.drop_unfit => dropped.push(unfit),
            Err(unfit) => return Err(unfit),
        }
    }
    Ok((maker.workload, dropped))
}

/// Jobs with equal keys share a profile; floats are compared by their bits.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct ProfileKey {
    serving: Option<(u32, Span, Span)>,
    model: Option<String>,
    /// 0 if no prediction depends on it.
    batch: u32,
    restart_class: u32,
    step: u64,
    stages: Option<[u64; 4]>,
    model_speed: Vec<(u8, u64)>,
    scaling: Option<u64>,
    training: Option<String>,
}

struct Maker<'a> {
    setting: &'a Setting<'a>,
    workload: Workload,
    profiles: BTreeMap<ProfileKey, ProfileIdx>,
    /// The first profile of each kind of work: profiles that differ in their steps only.
    kinds: BTreeMap<ProfileKey, ProfileIdx>,
    /// Predictions by model and batch size; profiles differ by step time as well.
    predicted: BTreeMap<String, BTreeMap<u32, Option<Predicted>>>,
    teams: BTreeMap<String, TeamIdx>,
}

impl Maker<'_> {
    fn admit(&mut self, mut job: TraceJob) -> Result<(), Unfit> {
        if job.class == TraceClass::Service {
            self.complete_service(&mut job)?;
        }
        let gpu_models = self.gpu_models(&job)?;
        let profile = self.profile(&job);
        let team = self.team(job.team.as_deref().unwrap_or("all"));
        let gpus = u16::try_from(job.gpus).unwrap_or(u16::MAX);
        let most = job.gpus_max.unwrap_or(job.gpus);
        let spec = Spec {
            gpus_max: u16::try_from(most).unwrap_or(u16::MAX).max(gpus),
            knobs: Knobs {
                batch: job.batch,
                mem_mib: asked_mib(&job),
                cpu_milli: job.cpu_milli,
                ..Knobs::WHOLE
            },
            team,
            class: match job.class {
                TraceClass::Guaranteed => Class::Guaranteed,
                TraceClass::BestEffort => Class::BestEffort,
                TraceClass::Service => Class::Service,
            },
            declared_s: Some(Number::of(job.duration_s)),
            deadline: job.deadline_us.map(Time),
            max_slowdown: job.max_slowdown.map(Number::of),
            weight: Number::of(job.weight),
            deadline_values: deadline_values(&job),
            gpu_models,
            retries: self.setting.retries,
            ..Spec::training(gpus, job.steps, profile)
        };
        let at = Time(job.submit_us);
        let Some(service) = job.service else {
            let arrival = Arrival { at, name: job.id, spec, work: job.steps, requests: None };
            self.workload.arrivals.push(arrival);
            return Ok(());
        };
        let slo = service.slo_ms.map(|ms| Slo { p99_us: (ms * 1e3).round() as u32 });
        let spec = Spec { work: None, declared_s: None, slo, ..spec };
        let TraceService { load, bursts, recorded, .. } = *service;
        let rates = || Requests::Rates { rates: load.into(), bursts };
        let requests = recorded.unwrap_or_else(rates);
        let requests = Some((requests, Span::from_secs(job.duration_s)));
        let work = f64::INFINITY;
        self.workload.arrivals.push(Arrival { at, name: job.id, spec, work, requests });
        Ok(())
    }

    /// Fills in batch size, batch time and memory of a service from the measurements.
    fn complete_service(&self, job: &mut TraceJob) -> Result<(), Unfit> {
        let service = job.service.get_or_insert_default();
        if job.batch == 0 {
            job.batch = SERVICE_BATCH;
        }
        let atlas = self.setting.measured().atlas;
        let measured = job.model.as_deref().and_then(|m| truth::service(atlas, m));
        let batch_s = service.batch_s.or(measured.map(|t| atlas.batch_s(t, job.batch, None)));
        let Some(batch_s) = batch_s else {
            let model = job.model.as_deref();
            let known = model
                .map_or("it names no model".into(), |m| format!("no service {m:?} was measured"));
            let what =
                format!("{known}: name a measured one, or give step_s, the seconds of a batch");
            let (name, cluster) = (job.id.clone(), self.setting.cluster.to_string());
            return Err(Unfit { name, cluster, what });
        };
        service.measured = service.batch_s.is_none();
        (job.step_s, service.batch_s) = (batch_s, Some(batch_s));
        if job.mem_mib == 0 {
            job.mem_mib = measured.map_or(0, |t| atlas.counters(t, job.batch).mem_mib);
        }
        Ok(())
    }

    /// The serving profile that policies see.
    fn serving(&self, job: &TraceJob) -> Option<Serving> {
        let service = job.service.as_deref()?;
        let atlas = self.setting.measured().atlas;
        let timeout_ms = service.timeout_ms.or(service.slo_ms.map(|ms| ms * TIMEOUT_OF_SLO));
        let measured = job.model.as_deref().and_then(|m| truth::service(atlas, m));
        let (base_mib, item_mib) = measured.map_or((0.0, 0.0), |t| service_memory(atlas, t));
        Some(Serving {
            batch: job.batch,
            timeout: Span::from_secs(timeout_ms.unwrap_or(TIMEOUT_MS) / 1e3),
            warm_up: Span::from_secs(service.warm_up_s.unwrap_or(WARM_UP_S)),
            base_mib,
            item_mib,
        })
    }

    /// Bit mask of the GPU models that the job may use; an error if it fits on none.
    fn gpu_models(&self, job: &TraceJob) -> Result<u32, Unfit> {
        let unfit = |what: String| {
            Err(Unfit { name: job.id.clone(), cluster: self.setting.cluster.to_string(), what })
        };
        let wanted = |name: &str| {
            let requested = job.gpu_models.is_empty()
                || job.gpu_models.iter().any(|k| k.eq_ignore_ascii_case(name));
            let runs = |(k, speed): &(String, f64)| *speed > 0.0 || !k.eq_ignore_ascii_case(name);
            requested && job.model_speed.iter().all(runs)
        };
        let named = self.setting.cluster.gpu_models.iter().any(|k| wanted(&k.name));
        if !named {
            return unfit(format!("it needs a GPU of model {}", job.gpu_models.join(" or ")));
        }
        let mut mask = 0u32;
        let mut gpus = 0u32;
        for group in &self.setting.cluster.groups {
            let model = &self.setting.cluster.gpu_models[usize::from(group.gpu_model)];
            let mem_fits = model.mem_mib == 0 || asked_mib(job) <= model.mem_mib;
            let per_node = if group.cpu_milli == 0 || job.cpu_milli == 0 {
                u32::from(group.gpus)
            } else {
                (group.cpu_milli / job.cpu_milli).min(u32::from(group.gpus))
            };
            // A gang that spans nodes needs CPU for every GPU of each node.
            let whole = per_node == u32::from(group.gpus);
            if wanted(&model.name) && mem_fits && (whole || job.gpus <= per_node) {
                mask |= 1 << group.gpu_model;
                gpus += group.count * per_node;
            }
        }
        if mask == 0 {
            return unfit("no GPU has the memory, or no node the CPU, that it asks for".into());
        }
        if job.gpus > gpus {
            return unfit(format!("it needs {} suitable GPUs, there are {gpus}", job.gpus));
        }
        let all = mask.count_ones() as usize == self.setting.cluster.gpu_models.len();
        Ok(if all { u32::MAX } else { mask })
    }

    /// Predicted resource use of the job's model; `None` for services.
    fn predicted(&mut self, job: &TraceJob) -> Option<Predicted> {
        // The published simulators do not predict, and training the predictor would take longer
        // than some of their runs.
        if self.setting.compat.is_some() {
            return None;
        }
        let model = job.model.as_deref().filter(|_| job.class != TraceClass::Service)?;
        if let Some(known) = self.predicted.get(model).and_then(|m| m.get(&job.batch)) {
            return *known;
        }
        let predicted = predict(self.setting.cluster, model, job.batch);
        self.predicted.entry(model.into()).or_default().insert(job.batch, predicted);
        predicted
    }

    fn profile(&mut self, job: &TraceJob) -> ProfileIdx {
        let predicted = self.predicted(job);
        let measured =
            |(model, speed): &(String, f64)| Some((self.setting.cluster.gpu_model(model)?, *speed));
        let model_speed: Vec<(u8, f64)> = job.model_speed.iter().filter_map(measured).collect();
        let serving = self.serving(job);
        let key = ProfileKey {
            serving: serving.map(|s| (s.batch, s.timeout, s.warm_up)),
            model: job.model.clone(),
            batch: predicted.map_or(0, |_| job.batch),
            restart_class: if self.setting.compat.is_some() { job.gpus } else { 0 },
            step: job.step_s.to_bits(),
            stages: job.stages_s.map(|s| s.map(f64::to_bits)),
            model_speed: model_speed.iter().map(|(k, s)| (*k, s.to_bits())).collect(),
            scaling: job.scaling.map(f64::to_bits),
            training: job.training.as_ref().map(|t| format!("{t:?}")),
        };
        let profiles = &mut self.workload.profiles;
        let setting = self.setting;
        let compat = setting.compat;
        let kinds = &mut self.kinds;
        *self.profiles.entry(key.clone()).or_insert_with(|| {
            let mut profile = Profile::of_step(job.step_s);
            // Published simulators know nothing of kinds.
            if job.model.is_some() && compat.is_none() {
                let kind = ProfileKey { step: 0, batch: job.batch, ..key };
                let new = ProfileIdx::from_usize(profiles.len());
                profile.kind = Some(*kinds.entry(kind).or_insert(new)).filter(|k| *k != new);
            }
            profile.stages_s = job.stages_s.map(|s| s.map(Number::of));
            let speeds = model_speed.into_iter();
            profile.model_speed = speeds.map(|(k, s)| (k, Positive::of(s))).collect();
            profile.scaling = job.scaling;
            profile.serving = serving;
            if job.service.is_some() {
                let Measurements { atlas, gpu_model } = setting.measured();
                profile.latency = if compat.is_none() { profiled(atlas, job) } else { None };
                if job.service.as_ref().is_some_and(|s| s.measured) {
                    profile.model_speed = relative_speeds(setting.cluster, gpu_model);
                }
            }
            profile.predicted = predicted;
            profile.training = job.training.as_deref().cloned();
            profile.sensitivity = job.sensitivity.as_deref().cloned().map(Box::new);
            let model = job.model.as_deref();
            if let Some((_, skew, spread)) = MODELS.iter().find(|m| Some(m.0) == model) {
                profile.skew = Some(*skew);
                profile.spread_speed = Positive::of(*spread);
            }
            if let Some(compat) = compat {
                compat.adjust(&mut profile, model, job.gpus);
            }
            if !setting.spread_penalty {
                profile.spread_speed = Positive::of(1.0);
            }
            profiles.push((model.unwrap_or("work").into(), profile));
            ProfileIdx::from_usize(profiles.len() - 1)
        })
    }

    fn team(&mut self, name: &str) -> TeamIdx {
        if let Some(team) = self.teams.get(name) {
            return *team;
        }
        let team = TeamIdx::from_usize(self.workload.teams.len());
        self.workload.teams.push(name.into());
        self.teams.insert(name.into(), team);
        team
    }
}

/// GPU memory that the job requests; if the trace has none, the memory at its own batch size.
fn asked_mib(job: &TraceJob) -> u32 {
    let own = job.training.as_ref().and_then(|t| t.mem_mib(t.batch));
    if job.mem_mib == 0 { own.unwrap_or(0) } else { job.mem_mib }
}

/// All deadlines of a job with soft deadlines, and their values.
fn deadline_values(job: &TraceJob) -> Vec<(Time, Number)> {
    if job.soft_deadlines.is_empty() {
        return Vec::new();
    }
    let last = job.deadline_us.zip(job.value);
    let all = job.soft_deadlines.iter().copied().chain(last);
    all.map(|(at, value)| (Time(at), Number::of(value))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use roommate_core::measurement::rows;

    fn job(id: &str, model: &str, batch: u32) -> TraceJob {
        let model = Some(model.into());
        TraceJob { model, batch, ..TraceJob::new(id.into(), 0, 1, 60.0) }
    }

    fn profiles(jobs: Vec<TraceJob>, cluster: &str) -> Vec<(String, Profile)> {
        prepare(jobs, &Setting::of(&cluster.parse().unwrap())).unwrap().0.profiles
    }

    #[test]
    fn known_models_have_a_prediction() {
        let known = profiles(vec![job("a", "ResNet-50", 64), job("b", "resnet50", 64)], "1x1:h200");
        assert!(known[0].1.predicted.is_some());
        assert_eq!(known[0].1.predicted, known[1].1.predicted);
        let both = profiles(vec![job("a", "resnet50", 64), job("b", "resnet50", 16)], "1x1:h200");
        assert_ne!(both[0].1.predicted, both[1].1.predicted, "the batch size matters");
        let mixed = profiles(vec![job("a", "resnet50", 64)], "1x1:h200,1x1:t4");
        let small = profiles(vec![job("a", "resnet50", 64)], "1x1:t4");
        assert_eq!(mixed[0].1.predicted, small[0].1.predicted, "the busiest GPU model counts");
    }

    /// One measurement of a service, and one of training, without which an atlas is invalid.
    const OWN: &str = r#"{"kind": "serve", "name": "resnet50", "batch": 16, "sms": 10, "mem_mib": 777, "it_s": 4.0}
{"kind": "train", "name": "other", "batch": 16, "sms": 10, "mem_mib": 100, "it_s": 4.0}
"#;

    #[test]
    fn services_use_the_measurements_of_the_setting() {
        let own = Atlas::new(&[rows::parse(OWN).unwrap()]).unwrap();
        let measured = Some(Measurements { atlas: &own, gpu_model: None });
        let cluster: Cluster = "1x1:v100,1x1:a100".parse().unwrap();
        let service = || {
            let class = TraceClass::Service;
            vec![TraceJob { class, ..job("s", "resnet50", 16) }]
        };
        let of = |setting: &Setting<'_>| prepare(service(), setting).unwrap().0;
        let [built_in, own] =
            [None, measured].map(|measured| of(&Setting { measured, ..Setting::of(&cluster) }));
        assert!(built_in.profiles[0].1.step_s < 0.1, "the built-in H200");
        let profile = &own.profiles[0].1;
        assert_eq!(profile.step_s, 0.25);
        assert_eq!(own.arrivals[0].spec.knobs.mem_mib, 777);
        let whole = profile.latency.as_ref().unwrap().iter().find(|p| p.sm_permille == 1000);
        assert_eq!(whole.unwrap().seconds, 0.25);
        let [(_, v100), (_, a100)] = profile.model_speed[..] else { panic!("two GPU models") };
        assert!(v100 == 1.0 && a100 > 1.0, "measured on the first: {v100} {a100}");
    }

    #[test]
    fn a_workload_follows_its_setting() {
        let cluster: Cluster = "2x4".parse().unwrap();
        let setting = Setting { retries: 7.into(), spread_penalty: false, ..Setting::of(&cluster) };
        let (workload, _) = prepare(vec![job("a", "vgg16", 64)], &setting).unwrap();
        assert_eq!(workload.arrivals[0].spec.retries, 7.into());
        assert_eq!(workload.profiles[0].1.spread_speed, 1.0);
        assert!(profiles(vec![job("a", "vgg16", 64)], "2x4")[0].1.spread_speed < 1.0);
    }

    #[test]
    fn elastic_jobs_keep_their_limit_and_scaling() {
        let plain = job("a", "mystery", 0);
        let elastic = TraceJob { gpus_max: Some(4), scaling: Some(0.5), ..job("b", "mystery", 0) };
        let cluster = "1x2".parse().unwrap();
        let (workload, _) = prepare(vec![plain, elastic], &Setting::of(&cluster)).unwrap();
        let most: Vec<u16> = workload.arrivals.iter().map(|a| a.spec.gpus_max).collect();
        assert_eq!(most, [1, 4]);
        let scaling: Vec<Option<f64>> = workload.profiles.iter().map(|p| p.1.scaling).collect();
        assert_eq!(scaling, [None, Some(0.5)]);
    }

    #[test]
    fn unknown_models_and_services_have_no_prediction() {
        let mut service = job("s", "resnet50", 64);
        service.class = TraceClass::Service;
        let jobs = vec![job("a", "mystery", 64), job("b", "mystery", 32), service];
        let plain = profiles(jobs, "1x1");
        assert_eq!(plain.len(), 2, "batch sizes that change nothing share a profile");
        for (_, profile) in plain {
            assert_eq!(profile.predicted, None);
            assert!(!serde_json::to_string(&profile).unwrap().contains("predicted"));
        }
    }
}
