//! The policy trait, and the registry: names, papers, parameters and builders of all policies. The
//! command line, the documentation and the laws are derived from the registry.
//!
//! ```text
//!  name + JSON parameters ──→ Entry ──→ Params (strict) ──→ build ──→ Box<dyn Policy>
//!                                                                        │ schedule(plan)
//!  policy/NAME.rs: header = documentation, Params, build, schedule, pictures
//!  policy/NAME/    helpers of this policy only
//!  policy/serving  the frame of policies that place training beside services
//! ```
//!
//! Invariants: a policy edits the plan and nothing else; it does not depend on another policy;
//! called twice on the same state it changes nothing the second time; a replay of the journal
//! rebuilds the data that it keeps between calls.

use crate::math::rng::Rng;
use crate::plan::Plan;
use crate::queue::ranked_walk::Walk;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::ops::RangeInclusive;

/// Registers the policies of one file. Each has a name, the parameters that distinguish it
/// (`preset`), how it shares GPUs (`family`), whether it reads the durations of jobs
/// (`knows_durations`), what it does (`summary`), where it was published (`paper`, `-` if nowhere),
/// its parameters in published simulators (`compat`) and, for an ablation, the policy that it is an
/// ablation of (`ablates`) and the part that it omits (`lacks`). The header of the file `$source`
/// is their documentation; the file defines `Params`, `build` and `fuzz`.
macro_rules! registry {
    ($source:literal $((
        $name:literal,
        family: $family:ident, knows_durations: $knows:literal,
        preset: $preset:literal,
        summary: $summary:literal,
        paper: $paper:literal,
        compat: $compat:expr
        $(, ablates: $whole:literal, lacks: $part:ident)?
    ))+) => {
        pub(crate) const ENTRIES: &[$crate::policy::Entry] = &[$($crate::policy::Entry {
            name: $name,
            family: $crate::policy::Family::$family,
            knows_durations: $knows,
            summary: $summary,
            paper: $paper,
            ablation: registry!(@ablates $($whole, $part)?),
            source: include_str!($source),
            compat: $compat,
            preset: $preset,
            build: |params| Ok(Box::new(build($crate::policy::read(params)?)?)),
            defaults: $crate::policy::shown::<Params>,
            fuzz,
        }),+];
    };
    (@ablates) => { None };
    (@ablates $whole:literal, $part:ident) => {
        Some($crate::policy::Ablation { of: $whole, lacks: $crate::policy::Part::$part })
    };
}

mod antman;
mod chronus;
mod fifo;
mod gandiva;
mod gavel;
mod gpulets;
mod gslice;
mod horus;
mod iadeep;
mod mps;
mod mudi;
mod muri;
mod muxflow;
mod roommate;
pub mod serving;
mod sjf;
mod srsf;
mod srtf;
mod synergy;
mod tiresias;
#[cfg(test)]
#[path = "../tests/contributing/widest_first.rs"]
mod widest_first;

/// A scheduling policy.
pub trait Policy: Send {
    /// Edits the plan. Called after facts that could change a decision, and at [`Plan::wake_at`].
    fn schedule(&mut self, plan: &mut Plan<'_>);

    /// Whether it is asked again at the instant at which a job has left that it just stopped or
    /// suspended: the job waits from then on, and could be placed elsewhere. Others see it at the
    /// next fact.
    fn asks_again(&self) -> bool {
        false
    }
}

impl Policy for Walk {
    fn schedule(&mut self, plan: &mut Plan<'_>) {
        Self::schedule(self, plan);
    }
}

/// Parameters as given by the user: a JSON object.
pub type Params = Map<String, Value>;

/// Reason a policy cannot be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// No policy of this name.
    #[error("there is no policy {0:?}")]
    Unknown(String),
    /// A parameter that does not exist or has an invalid value.
    #[error("policy {policy:?}: {what}")]
    Params {
        /// The policy.
        policy: String,
        /// What is wrong.
        what: String,
    },
    /// The policy has no parameters for this published simulator.
    #[error("policy {policy:?} has no parameters for --compat {compat}")]
    Compat {
        /// The policy.
        policy: String,
        /// The published simulator.
        compat: String,
    },
}

/// Part of a policy that an ablation omits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Changing batch sizes.
    BatchTuning,
    /// Predicting slowdowns: choosing a GPU by them, and making a job wait because of them.
    Prediction,
    /// Choosing the jobs of a group by how much the group gains.
    Matching,
    /// Interleaving a group in the order with the shortest step.
    StageOrder,
    /// Giving jobs more CPU and host memory than in proportion to their GPUs.
    AboveShare,
    /// Giving jobs less CPU and host memory than they request.
    BelowDemand,
}

/// How an ablation differs from the policy whose part it evaluates.
#[derive(Clone, Copy, Debug)]
pub struct Ablation {
    /// The policy that has the part.
    pub of: &'static str,
    /// The part that the ablation omits.
    pub lacks: Part,
}

/// How a policy shares GPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Family {
    /// Jobs wait for whole GPUs and keep them until they end.
    Queue,
    /// Jobs have whole GPUs and are preempted by jobs of higher priority.
    Priority,
    /// Jobs share GPUs in time slices.
    TimeSharing,
    /// Several jobs run on a GPU at the same time.
    CoLocation,
    /// Fractions of time on each GPU model from an optimization problem, applied in rounds.
    Gavel,
    /// Whole GPUs, and CPU and host memory by the sensitivity of jobs to them.
    HostResources,
    /// Whole GPUs in leases, so that deadlines are met.
    Deadlines,
    /// Training beside inference services that have SLOs.
    Services,
}

impl Family {
    /// All families, in the order of the registry.
    pub const ALL: [Self; 8] = [
        Self::Queue,
        Self::Priority,
        Self::TimeSharing,
        Self::CoLocation,
        Self::Gavel,
        Self::HostResources,
        Self::Deadlines,
        Self::Services,
    ];

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Priority => "priority",
            Self::TimeSharing => "time sharing",
            Self::CoLocation => "co-location",
            Self::Gavel => "gavel",
            Self::HostResources => "CPU+memory",
            Self::Deadlines => "deadlines",
            Self::Services => "services",
        }
    }
}

/// A policy in the registry.
#[derive(Clone, Copy)]
pub struct Entry {
    /// Its name.
    pub name: &'static str,
    /// How it shares GPUs.
    pub family: Family,
    /// Whether it reads the durations of jobs (`Spec::work`, `Spec::declared_s`) with its default
    /// parameters. The law `only_policies_that_say_so_read_durations` checks it.
    pub knows_durations: bool,
    /// What it does, in one line.
    pub summary: &'static str,
    /// Where it was published.
    pub paper: &'static str,
    ablation: Option<Ablation>,
    /// Its source, whose header is its documentation.
    source: &'static str,
    /// Published simulators, and the parameters that make it the policy of each.
    pub compat: &'static [(&'static str, &'static str)],
    /// Parameters in which this entry differs from others of the same file, a JSON object.
    preset: &'static str,
    build: fn(Params) -> Result<Box<dyn Policy>, String>,
    defaults: fn(Params) -> Result<Value, String>,
    /// Chooses random values of its parameters for the laws.
    fuzz: fn(&mut Fuzz<'_>),
}

impl Entry {
    /// Whether it is an ablation of another policy; `compare` omits ablations that are not named.
    pub fn is_ablation(&self) -> bool {
        self.ablation.is_some()
    }

    /// The policy that it is an ablation of and the part that it omits, if it is an ablation.
    pub fn ablation(&self) -> Option<Ablation> {
        self.ablation
    }

    /// The parameters in which it differs from other entries of the same file.
    pub fn preset(&self) -> Params {
        object(self.preset)
    }

    /// Builds the policy with its defaults, overridden by these parameters.
    pub fn build(&self, params: &Params) -> Result<Box<dyn Policy>, PolicyError> {
        (self.build)(self.merged(params)).map_err(|what| self.wrong(what))
    }

    /// All parameters and their values, given these.
    pub fn params(&self, params: &Params) -> Result<Value, PolicyError> {
        (self.defaults)(self.merged(params)).map_err(|what| self.wrong(what))
    }

    /// All parameters for a world of real jobs: a part of a GPU that one of them asks for is
    /// promised to it, unless the parameters given say otherwise. In traces such parts are records
    /// of what another scheduler gave away.
    pub fn live_params(&self, given: &Params) -> Result<Params, PolicyError> {
        const PROMISE: &str = "promise_parts";
        let mut params = given.clone();
        if !given.contains_key(PROMISE) && self.params(given)?.get(PROMISE).is_some() {
            params.insert(PROMISE.into(), true.into());
        }
        match self.params(&params)? {
            Value::Object(all) => Ok(all),
            _ => Ok(Params::new()),
        }
    }

    /// Random parameters for this case, from the values that its file lists.
    pub fn fuzz(&self, rng: &mut Rng, case: FuzzCase) -> Result<Params, PolicyError> {
        let defaults = self.params(&Params::new())?;
        let mut fuzz = Fuzz { entry: self.name, case, rng, defaults, params: Params::new() };
        (self.fuzz)(&mut fuzz);
        Ok(fuzz.params)
    }

    /// Its parameters in a published simulator.
    pub fn compat_params(&self, compat: &str) -> Result<Params, PolicyError> {
        let known = self.compat.iter().find(|(name, _)| *name == compat);
        let (_, text) = known.ok_or_else(|| PolicyError::Compat {
            policy: self.name.into(),
            compat: compat.into(),
        })?;
        Ok(object(text))
    }

    /// Its documentation: the header of its file.
    pub fn doc(&self) -> String {
        let header = self.source.lines().map_while(|l| l.strip_prefix("//!"));
        let mut text = String::new();
        for line in header {
            text.push_str(line.strip_prefix(' ').unwrap_or(line));
            text.push('\n');
        }
        text
    }

    fn merged(&self, params: &Params) -> Params {
        let mut all = self.preset();
        all.extend(params.clone());
        all
    }

    fn wrong(&self, what: String) -> PolicyError {
        PolicyError::Params { policy: self.name.into(), what }
    }
}

/// Constraints on the parameters of a random case.
#[derive(Clone, Copy, Debug)]
pub struct FuzzCase {
    /// The longest (re)start, whole seconds.
    pub restart_s: u64,
    /// GPUs of the widest job.
    pub widest: u64,
    /// Whether all events have to happen at whole ticks.
    pub on_ticks: bool,
}

/// Chooses random parameters for the laws. A value of null leaves a parameter at its default.
pub struct Fuzz<'a> {
    /// The name of the policy.
    pub entry: &'static str,
    /// Constraints on the parameters.
    pub case: FuzzCase,
    rng: &'a mut Rng,
    defaults: Value,
    params: Params,
}

impl Fuzz<'_> {
    /// The default of the parameter.
    pub fn default_of(&self, name: &str) -> &Value {
        &self.defaults[name]
    }

    /// A number below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.rng.below(n)
    }

    /// True with this probability.
    pub fn chance(&mut self, p: f64) -> bool {
        self.rng.chance(p)
    }

    /// One of these, uniformly.
    pub fn one_of<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len() as u64) as usize].clone()
    }

    /// Sets the parameter.
    pub fn set(&mut self, name: &str, value: impl Into<Value>) {
        let value = value.into();
        if !value.is_null() {
            self.params.insert(name.into(), value);
        }
    }

    /// Sets the parameter to one of these values.
    pub fn pick<T: Clone + Into<Value>>(&mut self, name: &str, of: &[T]) {
        let value = self.one_of(of);
        self.set(name, value);
    }

    /// Sets the parameter to a number in this range.
    pub fn range(&mut self, name: &str, range: RangeInclusive<u64>) {
        let value = range.start() + self.below(range.end() - range.start() + 1);
        self.set(name, value);
    }

    /// Sets the parameter to true with this probability, else to false; returns the value.
    pub fn flip(&mut self, name: &str, p: f64) -> bool {
        let on = self.chance(p);
        self.set(name, on);
        on
    }

    /// Sets how the GPUs of a gang are chosen among the nodes.
    pub fn rule(&mut self) {
        self.pick("rule", &["consolidated", "first_fit", "spread", "count"]);
    }

    /// Sets from how many GPUs on jobs have their nodes exclusively.
    pub fn dedicate(&mut self) {
        self.pick("dedicate_from", &[None, None, Some(1), Some(2), Some(4)]);
    }

    /// Sets how long jobs insist on a consolidated placement.
    pub fn patience(&mut self) {
        self.pick("patience_s", &[None, None, Some(0), Some(2), Some(9)]);
    }
}

fn object(text: &str) -> Params {
    serde_json::from_str(text).expect("presets in the registry are JSON objects")
}

/// Reads parameters strictly: an unknown name is an error that lists the known ones.
fn read<P: DeserializeOwned>(params: Params) -> Result<P, String> {
    serde_json::from_value(Value::Object(params)).map_err(|e| e.to_string())
}

fn shown<P: DeserializeOwned + Serialize>(params: Params) -> Result<Value, String> {
    serde_json::to_value(read::<P>(params)?).map_err(|e| e.to_string())
}

/// The entries of all files, in the order in which they are shown.
const FILES: &[&[Entry]] = &[
    fifo::ENTRIES,
    sjf::ENTRIES,
    srtf::ENTRIES,
    srsf::ENTRIES,
    tiresias::ENTRIES,
    gandiva::ENTRIES,
    muri::ENTRIES,
    antman::ENTRIES,
    gavel::ENTRIES,
    horus::ENTRIES,
    synergy::ENTRIES,
    chronus::ENTRIES,
    mps::ENTRIES,
    iadeep::ENTRIES,
    mudi::ENTRIES,
    gslice::ENTRIES,
    gpulets::ENTRIES,
    muxflow::ENTRIES,
    roommate::ENTRIES,
];

const COUNT: usize = {
    let (mut count, mut file) = (0, 0);
    while file < FILES.len() {
        count += FILES[file].len();
        file += 1;
    }
    count
};

/// All policies, in the order in which they are shown.
pub static POLICIES: &[Entry] = &{
    let mut all = [FILES[0][0]; COUNT];
    let (mut count, mut file) = (0, 0);
    while file < FILES.len() {
        let mut entry = 0;
        while entry < FILES[file].len() {
            all[count] = FILES[file][entry];
            entry += 1;
            count += 1;
        }
        file += 1;
    }
    all
};

/// The example of CONTRIBUTING.md, which is registered in unit tests only.
#[cfg(test)]
const EXAMPLES: &[Entry] = widest_first::ENTRIES;
#[cfg(not(test))]
const EXAMPLES: &[Entry] = &[];

/// The policy of this name.
pub fn find(name: &str) -> Result<&'static Entry, PolicyError> {
    let found = POLICIES.iter().chain(EXAMPLES).find(|e| e.name == name);
    found.ok_or_else(|| PolicyError::Unknown(name.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_ablations_refer_to_policies() {
        for entry in POLICIES {
            assert_eq!(POLICIES.iter().filter(|e| e.name == entry.name).count(), 1);
            if let Some(ablation) = entry.ablation() {
                assert!(find(ablation.of).is_ok_and(|e| !e.is_ablation()), "{}", entry.name);
            }
        }
        assert_eq!(POLICIES.len(), FILES.iter().map(|f| f.len()).sum::<usize>());
    }

    #[test]
    fn values_for_the_laws_are_valid_parameters() {
        let case = FuzzCase { restart_s: 3, widest: 8, on_ticks: false };
        let mut rng = Rng::new(1);
        for entry in POLICIES.iter().chain(EXAMPLES) {
            let tried: Vec<Params> = (0..50).map(|_| entry.fuzz(&mut rng, case).unwrap()).collect();
            assert!(tried.iter().any(|t| *t != tried[0]), "{} is always the same", entry.name);
            tried.iter().for_each(|t| drop(entry.build(t).unwrap()));
        }
    }
}
