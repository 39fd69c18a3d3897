//! Builds the oracle's case from a small scenario: the true speed of every task under every
//! setting.

use super::{Group, Options, Puzzle, members};
use crate::scenario::SampledWorkload;
use crate::serving::requests::Requests;
use crate::serving::{Conditions, Judge, Verdict};
use crate::world::Arrival;
use roommate_core::cluster::Cluster;
use roommate_core::idx::{IdxVec, JobIdx};
use roommate_core::interference::Truth;
use roommate_core::job::{Class, Job};
use roommate_core::knobs::Knobs;
use roommate_core::profile::Serving;
use roommate_core::state::{Costs, State};
use serde::Deserialize;

/// The values that knobs take in the search.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Space {
    /// Batch sizes of training, as factors of the job's own batch size.
    #[serde(default = "own")]
    pub batches: Vec<f64>,
    /// Most training jobs on a GPU.
    pub most: usize,
    /// Largest batch sizes of a service.
    #[serde(default)]
    pub service_batches: Vec<u32>,
    /// Shares of the GPU that a service is confined to, the rest split evenly among training jobs;
    /// the unconfined setting is always tried as well.
    #[serde(default)]
    pub service_shares: Vec<f64>,
}

fn own() -> Vec<f64> {
    vec![1.0]
}

/// Most tasks of a case.
pub(crate) const MOST_TASKS: usize = 8;

/// Fraction of its windows in which a service may violate its SLO.
const MISSES: f64 = 0.01;

/// Builds the case of a workload under a true interference model. Each service has a GPU of its
/// own; there are as many services as GPUs, or none.
pub fn puzzle(
    sampled: &SampledWorkload,
    cluster: &Cluster,
    truth: &mut dyn Truth,
    space: &Space,
) -> Puzzle {
    let arrivals: IdxVec<JobIdx, &Arrival> = sampled.workload.arrivals.iter().collect();
    let mut state = State::new(cluster, Costs::default());
    state.profiles = sampled.workload.profiles.iter().map(|(_, p)| p.clone()).collect();
    for arrival in &arrivals {
        state.specs.push(arrival.spec.clone());
        state.jobs.push(Job::expected());
    }
    let (services, tasks): (Vec<JobIdx>, Vec<JobIdx>) =
        arrivals.indices().partition(|i| arrivals[*i].spec.class == Class::Service);
    let mut judge = Judge::default();
    let mut kind = |service: Option<JobIdx>, truth: &mut dyn Truth| {
        let service = service.map(|i| {
            let requests = arrivals[i].requests.as_ref().map(|r| &r.0);
            let serving = state.profiles[arrivals[i].spec.profile].serving;
            (i, serving.expect("a service"), requests.expect("a service has requests"))
        });
        let mut options = Options::new();
        for group in 1..(1 as Group) << tasks.len() {
            if group.count_ones() as usize > space.most {
                continue;
            }
            let of: Vec<JobIdx> = members(group).map(|i| tasks[i]).collect();
            let settings = Candidate { state: &state, space, truth, judge: &mut judge, of: &of }
                .settings(service);
            if !settings.is_empty() {
                options.insert(group, settings);
            }
        }
        options
    };
    let gpus = cluster.gpus() as usize;
    let kinds: Vec<Options> = if services.is_empty() {
        vec![kind(None, truth)]
    } else {
        services.iter().map(|s| kind(Some(*s), truth)).collect()
    };
    let step_s = |job: JobIdx| state.profile(job).step_s;
    let seconds = |job: &JobIdx| {
        let arrival = arrivals[*job];
        (arrival.at.secs(), arrival.work * step_s(*job))
    };
    Puzzle {
        tasks: tasks.iter().map(seconds).collect(),
        gpus: (0..gpus).map(|gpu| if kinds.len() == 1 { 0 } else { gpu }).collect(),
        kinds,
    }
}

/// A service: its job, its serving profile and its requests.
type Service<'a> = (JobIdx, Serving, &'a Requests);

/// A set of training jobs to run together on one GPU.
struct Candidate<'a> {
    state: &'a State,
    space: &'a Space,
    truth: &'a mut dyn Truth,
    judge: &'a mut Judge,
    of: &'a [JobIdx],
}

impl Candidate<'_> {
    /// The speeds of the jobs under every setting that fits and, beside a service, meets its SLO.
    fn settings(&mut self, service: Option<Service<'_>>) -> Vec<Vec<f64>> {
        let mut found = Vec::new();
        for knobs in self.batches() {
            match service {
                None => {
                    let free = |(job, k): &(JobIdx, Knobs)| (*job, Knobs { sm_permille: 0, ..*k });
                    let tenants: Vec<(JobIdx, Knobs)> = knobs.iter().map(free).collect();
                    if self.fits(&tenants, 0) {
                        found.push(self.speeds(&tenants));
                    }
                }
                Some(service) => self.beside(service, &knobs, &mut found),
            }
        }
        found
    }

    fn beside(&mut self, of: Service<'_>, knobs: &[(JobIdx, Knobs)], found: &mut Vec<Vec<f64>>) {
        let (service, serving, _) = of;
        let shares = self.space.service_shares.iter().map(|s| Some((s * 1000.0).round() as u16));
        let shares: Vec<Option<u16>> = shares.chain([None]).collect();
        for batch in self.space.service_batches.clone() {
            if !self.fits(knobs, serving.mem_mib(batch)) {
                continue;
            }
            for share in &shares {
                let own = share.unwrap_or(0);
                let rest = share.map_or(0, |s| (1000 - s) / knobs.len() as u16);
                let confined =
                    |(job, k): &(JobIdx, Knobs)| (*job, Knobs { sm_permille: rest, ..*k });
                let mut tenants =
                    vec![(service, Knobs { batch, sm_permille: own, ..Knobs::WHOLE })];
                tenants.extend(knobs.iter().map(confined));
                if self.keeps_objective(of, batch, &mut tenants) {
                    found.push(self.speeds(&tenants)[1..].to_vec());
                }
            }
        }
    }

    /// Whether the service, first of the tenants, meets its SLO; sets its load in the truth.
    fn keeps_objective(
        &mut self,
        (service, serving, requests): Service<'_>,
        batch: u32,
        tenants: &mut [(JobIdx, Knobs)],
    ) -> bool {
        let slo_s =
            self.state.spec(service).slo.map_or(f64::INFINITY, |s| f64::from(s.p99_us) / 1e6);
        let step_s = self.state.profile(service).step_s;
        let mut verdict = Verdict::default();
        // The service's load and the speed of its co-located jobs depend on each other: iterate.
        for _ in 0..3 {
            self.truth.set_load(service, verdict.busy);
            let times = Judge::sizes(batch).map(|n| {
                tenants[0].1.batch = n;
                step_s / self.truth.speed(self.state, 0, tenants, 0).mean
            });
            let times: Vec<f64> = times.collect();
            tenants[0].1.batch = batch;
            let timeout_s = serving.timeout.secs();
            let conditions = Conditions { batch, timeout_s, slo_s, requests };
            verdict = self.judge.verdict(&conditions, &times);
        }
        self.truth.set_load(service, verdict.busy);
        verdict.missed <= MISSES
    }

    /// Every combination of batch sizes.
    fn batches(&self) -> Vec<Vec<(JobIdx, Knobs)>> {
        let mut all: Vec<Vec<(JobIdx, Knobs)>> = vec![Vec::new()];
        for job in self.of {
            let asked = self.state.spec(*job).knobs;
            let sizes = match &self.state.profile(*job).training {
                None => vec![(*job, asked)],
                Some(training) => {
                    let factors = self.space.batches.iter();
                    let batch = |f: &f64| (f64::from(training.batch) * f).round() as u32;
                    let range = training.batch_min..=training.batch_max;
                    let batches = factors.map(batch).filter(|b| range.contains(b));
                    let knobs = batches.map(|b| Knobs {
                        mem_mib: training.mem_mib(b).unwrap_or(asked.mem_mib),
                        batch: b,
                        ..asked
                    });
                    knobs.map(|k| (*job, k)).collect::<Vec<(JobIdx, Knobs)>>()
                }
            };
            let with = |some: &Vec<(JobIdx, Knobs)>| {
                let some = some.clone();
                sizes.iter().map(move |size| some.iter().copied().chain([*size]).collect())
            };
            all = all.iter().flat_map(|some| with(some).collect::<Vec<Vec<_>>>()).collect();
        }
        all
    }

    fn fits(&self, tenants: &[(JobIdx, Knobs)], more_mib: u32) -> bool {
        let room = self.state.gpu_models[0].mem_mib;
        let needs = tenants.iter().map(|(_, k)| u64::from(k.mem_mib)).sum::<u64>();
        room == 0 || needs + u64::from(more_mib) <= u64::from(room)
    }

    /// Work per second of each tenant; 1 = alone on the reference GPU at its own batch size.
    fn speeds(&self, tenants: &[(JobIdx, Knobs)]) -> Vec<f64> {
        let speed = |who: usize| {
            let (job, knobs) = tenants[who];
            let training = self.state.profile(job).training.as_ref();
            // The gradient noise of the oracle's cases is constant.
            let worth = training.map_or(1.0, |t| t.goodput_factor(knobs, t.noise.start));
            self.truth.speed(self.state, 0, tenants, who).mean * worth
        };
        (0..tenants.len()).map(speed).collect()
    }
}
