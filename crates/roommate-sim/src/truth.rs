//! True interference models of a simulation: the registry of truths, and the mapping from profile
//! names to measured tasks.

#[cfg(test)]
#[path = "../tests/contributing/turns.rs"]
mod turns;

use crate::trace::pairs::Pairs;
use crate::trace::{TraceClass, TraceJob};
use roommate_core::interference::measured::{Measured, Work};
use roommate_core::interference::stages::Interleaved;
use roommate_core::interference::utilization::{Demand, Utilization};
use roommate_core::interference::{self, Undisturbed};
use roommate_core::math::hash::fnv1a;
use roommate_core::math::rng::Rng;
use roommate_core::measurement::atlas::{Atlas, Empty, read_graphs};
use roommate_core::measurement::contention::TaskId;
use roommate_core::measurement::rows::{self, TaskKind};
use roommate_core::profile::Profile;
use std::sync::Arc;

/// Profiles with their names.
type Profiles<'a> = &'a [(String, Profile)];

/// An interference model, and the number of profiles that it has data for.
type Model = (Box<dyn interference::Truth>, usize);

/// Inputs that a truth is built from.
#[derive(Clone, Copy)]
enum Recipe {
    /// Profiles only.
    Profiles(fn(Profiles<'_>) -> Model),
    /// Measurements and profiles.
    Atlas(fn(&Arc<Atlas>, Profiles<'_>) -> Model),
    /// A table of pair speeds and profiles.
    Pairs(fn(&Pairs, Profiles<'_>) -> Model),
}

/// A truth in the registry: how roommates slow each other down in a simulation.
pub struct TruthEntry {
    /// Name on the command line.
    pub name: &'static str,
    /// One line for the help.
    pub summary: &'static str,
    recipe: Recipe,
}

/// All truths, in the order of the help. The first is the default.
pub static TRUTHS: &[TruthEntry] = &[
    TruthEntry {
        name: "measured",
        summary: "Measured on real GPUs; a fitted model where nothing was measured",
        recipe: Recipe::Atlas(measured),
    },
    TruthEntry { name: "table", summary: "From a table of pairs", recipe: Recipe::Pairs(table) },
    TruthEntry {
        name: "utilization",
        summary: "From the total demand of the tenants for each resource",
        recipe: Recipe::Atlas(utilization),
    },
    TruthEntry {
        name: "stages",
        summary: "From the stages of a step that the tenants interleave",
        recipe: Recipe::Profiles(|all| (Box::new(Interleaved::default()), all.len())),
    },
    TruthEntry {
        name: "saturated",
        summary: "Every job fills its GPU alone, so that tenants do not do more than take turns",
        recipe: Recipe::Profiles(saturated),
    },
    TruthEntry {
        name: "none",
        summary: "No interference",
        recipe: Recipe::Profiles(|all| (Box::new(Undisturbed), all.len())),
    },
];

/// The truth of this name.
pub fn find(name: &str) -> Option<&'static TruthEntry> {
    TRUTHS.iter().find(|t| t.name == name)
}

impl TruthEntry {
    /// Builds the truth; calls only the loader of the input that it needs.
    pub fn build<E>(
        &self,
        atlas: impl FnOnce() -> Result<Arc<Atlas>, E>,
        pairs: impl FnOnce() -> Result<Pairs, E>,
    ) -> Result<Truth, E> {
        Ok(match self.recipe {
            Recipe::Profiles(make) => Truth(Made::Profiles(make)),
            Recipe::Atlas(make) => Truth(Made::Atlas(make, atlas()?)),
            Recipe::Pairs(make) => Truth(Made::Pairs(make, pairs()?)),
        })
    }
}

/// A truth of the registry with its inputs.
#[derive(Clone, Debug)]
pub struct Truth(Made);

#[derive(Clone, Debug)]
enum Made {
    Profiles(fn(Profiles<'_>) -> Model),
    Atlas(fn(&Arc<Atlas>, Profiles<'_>) -> Model, Arc<Atlas>),
    Pairs(fn(&Pairs, Profiles<'_>) -> Model, Pairs),
    /// Measurements, with the measured task of each profile given explicitly.
    Mapped(Arc<Atlas>, Vec<Option<Work>>),
}

/// The project's measurements on one H200.
const H200: [&str; 3] = [
    include_str!("../../../profiles/h200.jsonl"),
    include_str!("../../../profiles/h200-pairs.jsonl"),
    include_str!("../../../profiles/h200-curves.jsonl"),
];

/// Batch times of services that are answered from CUDA graphs, on an H200.
const GRAPHS: &str = include_str!("../../../profiles/graphs-h200.jsonl");

/// The H200 measurements that are compiled into the program.
pub fn h200() -> Result<Atlas, Empty> {
    let sound = "the measurements that come with the program can be read";
    let sessions = H200.map(|text| rows::parse(text).expect(sound));
    Ok(Atlas::new(&sessions)?.with_graphs(&read_graphs(GRAPHS).expect(sound)))
}

/// Measured task and batch size that stand for a model of the public traces, by prefix of the model
/// name; the first match counts. Reinforcement learning (a2c, a3c, dqn) mostly waits for its
/// environment, so the task with the lowest GPU utilisation stands for it.
const STAND_INS: &[(&str, &str, u32)] = &[
    ("vgg", "vgg16-cifar", 128),
    ("alexnet", "vgg16-cifar", 128),
    ("resnet18", "resnet18-imagenet", 128),
    ("resnet", "resnet50-imagenet", 64),
    ("resnext", "resnet50-imagenet", 64),
    ("inception", "resnet50-imagenet", 64),
    ("googlenet", "resnet50-imagenet", 64),
    ("shufflenet", "mobilenetv3l-imagenet", 64),
    ("mobilenet", "mobilenetv3l-imagenet", 64),
    ("efficientnet", "mobilenetv3l-imagenet", 64),
    ("squeezenet", "squeezenet-cifar", 512),
    ("bert", "bert-squad", 8),
    ("gpt", "gpt2-lm", 4),
    ("vit", "vit-b16-imagenet", 32),
    ("transformer", "vit-b16-imagenet", 32),
    ("lm", "lstm-wikitext", 64),
    ("lstm", "lstm-wikitext", 64),
    ("gnmt", "lstm-wikitext", 64),
    ("deepspeech", "lstm-wikitext", 64),
    ("recommendation", "ncf-ml20m", 8192),
    ("ncf", "ncf-ml20m", 8192),
    ("neumf", "ncf-ml20m", 8192),
    ("autoencoder", "ncf-ml20m", 8192),
    ("a2c", "squeezenet-cifar", 128),
    ("a3c", "squeezenet-cifar", 128),
    ("dqn", "squeezenet-cifar", 128),
    ("cyclegan", "deeplab-mbv3", 16),
    ("deeplab", "deeplab-mbv3", 16),
    ("yolo", "deeplab-mbv3", 16),
];

/// Measured service that stands for a model, by prefix of the model name; the first match counts.
const SERVICES: &[(&str, &str)] = &[
    ("resne", "resnet50"),
    ("vgg", "resnet50"),
    ("inception", "inception_v3"),
    ("googlenet", "inception_v3"),
    ("gpt", "gpt2"),
    ("bert", "bert"),
    ("distilbert", "bert"),
    ("roberta", "roberta"),
    ("yolo", "yolos-tiny"),
];

/// The measured service of this name, or the one that stands for it.
pub(crate) fn service(atlas: &Atlas, model: &str) -> Option<TaskId> {
    let name = model.to_ascii_lowercase().replace(' ', "-");
    let plain: String = name.chars().filter(char::is_ascii_alphanumeric).collect();
    let stand_in = || SERVICES.iter().find(|(word, _)| plain.starts_with(word));
    let known = atlas.task(TaskKind::Serve, &name);
    known.or_else(|| atlas.task(TaskKind::Serve, stand_in()?.1))
}

/// The measured task of this name, at the job's own batch size, or the one that stands for it, at
/// the batch size listed in `STAND_INS`.
fn work(atlas: &Atlas, model: &str, own: Option<u32>) -> Option<Work> {
    let name = model.to_ascii_lowercase().replace(['_', ' '], "-");
    let middle = |task| {
        let batches: Vec<u32> = atlas.batches(task).collect();
        Work { task, batch: own.unwrap_or(batches[batches.len() / 2]), load: 1.0 }
    };
    if let Some(task) = atlas.task(TaskKind::Train, &name) {
        return Some(middle(task));
    }
    let plain: String = name.chars().filter(char::is_ascii_alphanumeric).collect();
    let (_, task, batch) = STAND_INS.iter().find(|(word, ..)| plain.starts_with(word))?;
    let task = atlas.task(TaskKind::Train, task)?;
    Some(Work { task, batch: *batch, load: 1.0 })
}

/// The measured task of each profile, or the one that stands for it.
fn works(atlas: &Atlas, profiles: Profiles<'_>) -> Vec<Option<Work>> {
    let serving =
        |name: &str, batch: u32| service(atlas, name).map(|task| Work { task, batch, load: 0.0 });
    let work_of = |(name, profile): &(String, Profile)| match profile.serving {
        Some(s) => serving(name, s.batch),
        None => work(atlas, name, profile.training.as_ref().map(|t| t.batch)),
    };
    profiles.iter().map(work_of).collect()
}

fn known(works: &[Option<Work>]) -> usize {
    works.iter().flatten().count()
}

fn measured(atlas: &Arc<Atlas>, profiles: Profiles<'_>) -> Model {
    mapped(atlas, works(atlas, profiles))
}

fn mapped(atlas: &Arc<Atlas>, works: Vec<Option<Work>>) -> Model {
    let known = known(&works);
    (Box::new(Measured::new(Arc::clone(atlas), works.into())), known)
}

/// Interference from total resource demand, with the demands of measured tasks.
fn utilization(atlas: &Arc<Atlas>, profiles: Profiles<'_>) -> Model {
    let works = works(atlas, profiles);
    let demands = works.iter().map(|w| w.map_or(Demand::default(), |w| demand(atlas, w)));
    (Box::new(Utilization::new(demands.collect())), known(&works))
}

/// The least that sharing can bring: n tenants run at 1/n of their speed each.
fn saturated(profiles: Profiles<'_>) -> Model {
    let full = Demand { sm: 1.0, ..Demand::default() };
    let mut model = Utilization::new(vec![full; profiles.len()].into());
    (model.sm_loss, model.slowest) = (1.0, 0.0);
    (Box::new(model), profiles.len())
}

fn table(pairs: &Pairs, profiles: Profiles<'_>) -> Model {
    let names: Vec<&str> = profiles.iter().map(|(name, _)| name.as_str()).collect();
    let (table, known) = pairs.table(&names);
    (Box::new(table), known)
}

impl Truth {
    /// The measurements, with a fitted model for pairs that were not measured.
    pub fn measured(atlas: Arc<Atlas>) -> Self {
        Self(Made::Atlas(measured, atlas))
    }

    /// The same, with the measured task of each profile given explicitly.
    pub fn mapped(atlas: Arc<Atlas>, works: Vec<Option<Work>>) -> Self {
        Self(Made::Mapped(atlas, works))
    }

    /// The interference model for these profiles, and the number of profiles that it has data for.
    pub fn model(&self, profiles: Profiles<'_>) -> Model {
        match &self.0 {
            Made::Profiles(make) => make(profiles),
            Made::Atlas(make, atlas) => make(atlas, profiles),
            Made::Pairs(make, pairs) => make(pairs, profiles),
            Made::Mapped(atlas, works) => mapped(atlas, works.clone()),
        }
    }

    /// The measurements to which models of traces are mapped by name, if any.
    fn atlas(&self) -> Option<&Atlas> {
        match &self.0 {
            Made::Atlas(_, atlas) => Some(atlas),
            Made::Profiles(_) | Made::Pairs(..) | Made::Mapped(..) => None,
        }
    }

    /// Assigns a measured task, chosen by a hash of the job's name, to training jobs without a
    /// model; returns how many. Otherwise all of them would have the same profile.
    pub fn name_models(&self, jobs: &mut [TraceJob]) -> u64 {
        let Some(atlas) = self.atlas() else { return 0 };
        let tasks: Vec<&str> =
            atlas.tasks().filter(|(_, k, _)| *k == TaskKind::Train).map(|(_, _, n)| n).collect();
        let mut named = 0;
        let nameless = |j: &&mut TraceJob| j.model.is_none() && j.class != TraceClass::Service;
        for job in jobs.iter_mut().filter(nameless) {
            let lot = fnv1a(job.id.as_bytes()) % tasks.len().max(1) as u64;
            job.model = tasks.get(lot as usize).map(|t| (*t).to_owned());
            named += 1;
        }
        named
    }

    /// Fills in the GPU memory by batch size of jobs whose batch size may change, where the trace
    /// has none and their model was measured.
    pub fn fill_memory(&self, jobs: &mut [TraceJob]) {
        let Some(atlas) = self.atlas() else { return };
        for job in jobs {
            let Some(training) = job.training.as_deref_mut().filter(|t| t.memory.is_empty()) else {
                continue;
            };
            let model = job.model.as_deref().unwrap_or_default();
            let Some(work) = work(atlas, model, Some(training.batch)) else { continue };
            training.memory = atlas.memory(work.task, work.batch, training.batch);
        }
    }
}

/// Gives each training job whose kind of work was not measured a measured task, and its GPU memory
/// where the trace has none. The tasks are drawn by seed; the jobs of one user under the same name
/// are of one kind and get the same.
pub fn deal_tasks(atlas: &Atlas, jobs: &mut [TraceJob], seed: u64) {
    let train = atlas.tasks().filter(|(_, kind, _)| *kind == TaskKind::Train);
    let tasks: Vec<&str> = train.map(|(_, _, name)| name).collect();
    for job in jobs.iter_mut().filter(|job| job.class != TraceClass::Service) {
        let own = (job.batch > 0).then_some(job.batch);
        let known = |job: &TraceJob| work(atlas, job.model.as_deref()?, own);
        if known(job).is_none() {
            let kind = match (&job.user, &job.model) {
                (_, None) => job.id.clone(),
                (user, Some(model)) => format!("{}/{model}", user.as_deref().unwrap_or_default()),
            };
            let lot = Rng::stream(seed, fnv1a(kind.as_bytes())).below(tasks.len().max(1) as u64);
            job.model = tasks.get(lot as usize).map(|task| (*task).to_owned());
        }
        if let (0, Some(work)) = (job.mem_mib, known(job)) {
            job.mem_mib = atlas.counters(work.task, work.batch).mem_mib;
        }
    }
}

fn demand(atlas: &Atlas, work: Work) -> Demand {
    let footprint = atlas.footprint(work.task, work.batch);
    let counters = atlas.counters(work.task, work.batch);
    Demand {
        sm: counters.sm_util,
        dram: counters.dram_util,
        // Inputs stay on the GPU in the measurements: only kernel launches, from one thread, cross
        // the bus.
        pcie_mib_s: footprint.launches,
        cpu_cores: 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use roommate_core::idx::{JobIdx, ProfileIdx};
    use roommate_core::job::Spec;
    use roommate_core::knobs::Knobs;
    use roommate_core::state::{Costs, State};

    #[test]
    fn the_example_truth_halves_the_speed_of_two_tenants() {
        let made = turns::ENTRY.build(|| Err(()), || Err(())).unwrap();
        let profiles = [("work".to_string(), Profile::of_step(1.0))];
        let (model, known) = made.model(&profiles);
        let state = State::new(&"1x1".parse().unwrap(), Costs::default());
        let tenants = [(JobIdx(0), Knobs::WHOLE), (JobIdx(1), Knobs::WHOLE)];
        assert_eq!((model.speed(&state, 0, &tenants, 0).mean, known), (0.5, 1));
    }

    #[test]
    fn saturated_tenants_take_turns() {
        let made = find("saturated").unwrap().build(|| Err(()), || Err(())).unwrap();
        let profiles = [("work".to_string(), Profile::of_step(1.0))];
        let (model, _) = made.model(&profiles);
        let mut state = State::new(&"1x1".parse().unwrap(), Costs::default());
        state.specs = vec![Spec::training(1, 1.0, ProfileIdx(0)); 3].into();
        let tenants = [0, 1, 2].map(|job| (JobIdx(job), Knobs::WHOLE));
        for n in 1..=3 {
            let speed = model.speed(&state, 0, &tenants[..n], 0).mean;
            assert!((speed - 1.0 / n as f64).abs() < 1e-12, "{n} tenants at {speed}");
        }
    }

    #[test]
    fn jobs_of_one_user_and_name_get_one_task() {
        let atlas = h200().unwrap();
        let job = |id: &str, user: &str, model: &str| {
            let mut job = TraceJob::new(id.into(), 0, 1, 1.0);
            job.user = Some(user.to_owned());
            job.model = (!model.is_empty()).then(|| model.to_owned());
            job
        };
        let mut jobs =
            vec![job("a", "ann", "bert-large"), job("b", "ann", "run"), job("c", "ann", "run")];
        jobs.extend((0..40).map(|i| job(&format!("u{i}"), &format!("u{i}"), "run")));
        let dealt = |seed: u64| {
            let mut jobs = jobs.clone();
            deal_tasks(&atlas, &mut jobs, seed);
            assert!(jobs.iter().all(|job| job.mem_mib > 0));
            jobs.into_iter().map(|job| job.model.unwrap()).collect::<Vec<_>>()
        };
        let first = dealt(0);
        assert_eq!((first[0].as_str(), &first[1]), ("bert-large", &first[2]));
        assert!(first[3..].iter().any(|model| *model != first[1]), "{first:?}");
        assert_eq!(dealt(0), first);
        assert_ne!(dealt(1), first);
    }

    #[test]
    fn names_of_truths_are_unique() {
        for truth in TRUTHS {
            assert_eq!(TRUTHS.iter().filter(|t| t.name == truth.name).count(), 1);
            assert!(find(truth.name).is_some_and(|t| t.summary == truth.summary));
        }
    }

    #[test]
    fn models_of_the_public_traces_have_stand_ins() {
        let atlas = h200().unwrap();
        let is = |model: &str, task: &str| {
            work(&atlas, model, None).map(|w| w.task) == atlas.task(TaskKind::Train, task)
        };
        assert!(is("ResNet-18 (batch size 32)", "resnet18-imagenet"));
        assert!(is("ResNet-50 (batch size 32)", "resnet50-imagenet"));
        assert!(is("shufflenet_v2_x1_0", "mobilenetv3l-imagenet"));
        assert!(is("resnet50-cifar", "resnet50-cifar"));
        assert!(work(&atlas, "work", None).is_none());
        let own = work(&atlas, "resnet50-cifar", Some(700)).map(|w| w.batch);
        assert_eq!(
            (own, work(&atlas, "vgg19", Some(700)).map(|w| w.batch)),
            (Some(700), Some(128))
        );
        for (_, task, batch) in STAND_INS {
            let task = atlas.task(TaskKind::Train, task).expect(task);
            assert!(atlas.batches(task).any(|b| b == *batch), "{task:?} at {batch}");
        }
    }
}
