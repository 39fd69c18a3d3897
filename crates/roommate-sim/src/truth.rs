//! Which truth a simulated world has: the registry of truths, and the way from profiles, by name,
//! to models of interference.

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
use roommate_core::measurement::atlas::{Atlas, Empty};
use roommate_core::measurement::contention::TaskId;
use roommate_core::measurement::rows::{self, TaskKind};
use roommate_core::profile::Profile;
use std::sync::Arc;

/// Kinds of work by name, as a truth finds them.
type Profiles<'a> = &'a [(String, Profile)];

/// A model of interference, and of how many of the profiles it knows something.
type Model = (Box<dyn interference::Truth>, usize);

/// What a truth is made of besides the profiles.
#[derive(Clone, Copy)]
enum Recipe {
    /// Nothing.
    Profiles(fn(Profiles<'_>) -> Model),
    /// Measurements.
    Atlas(fn(&Arc<Atlas>, Profiles<'_>) -> Model),
    /// A table of pairs.
    Pairs(fn(&Pairs, Profiles<'_>) -> Model),
}

/// A truth in the registry: how roommates really disturb each other in a simulated world.
pub struct TruthEntry {
    /// Its name on the command line.
    pub name: &'static str,
    /// How they do, in one line.
    pub summary: &'static str,
    recipe: Recipe,
}

/// All truths, in the order in which they are shown. The first is the usual one.
pub static TRUTHS: &[TruthEntry] = &[
    TruthEntry {
        name: "measured",
        summary: "As measured on real GPUs, with a model fitted to that for the rest",
        recipe: Recipe::Atlas(measured),
    },
    TruthEntry { name: "table", summary: "As a table of pairs says", recipe: Recipe::Pairs(table) },
    TruthEntry {
        name: "utilization",
        summary: "By how much of each resource they ask for together",
        recipe: Recipe::Atlas(utilization),
    },
    TruthEntry {
        name: "stages",
        summary: "By the stages of a step that they interleave",
        recipe: Recipe::Profiles(|all| (Box::new(Interleaved::default()), all.len())),
    },
    TruthEntry {
        name: "none",
        summary: "Not at all",
        recipe: Recipe::Profiles(|all| (Box::new(Undisturbed), all.len())),
    },
];

/// The truth of this name.
pub fn find(name: &str) -> Option<&'static TruthEntry> {
    TRUTHS.iter().find(|t| t.name == name)
}

impl TruthEntry {
    /// The truth, with measurements or a table of pairs, of which only what it needs is read.
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

/// How roommates really disturb each other: a truth of the registry, and what it is made of.
#[derive(Clone, Debug)]
pub struct Truth(Made);

#[derive(Clone, Debug)]
enum Made {
    Profiles(fn(Profiles<'_>) -> Model),
    Atlas(fn(&Arc<Atlas>, Profiles<'_>) -> Model, Arc<Atlas>),
    Pairs(fn(&Pairs, Profiles<'_>) -> Model, Pairs),
    /// As measured, where it was said which measured task each profile is.
    Mapped(Arc<Atlas>, Vec<Option<Work>>),
}

/// Our measurements of one H200.
const H200: [&str; 3] = [
    include_str!("../../../profiles/h200.jsonl"),
    include_str!("../../../profiles/h200-pairs.jsonl"),
    include_str!("../../../profiles/h200-curves.jsonl"),
];

/// What was measured on our H200, as part of the program.
pub fn h200() -> Result<Atlas, Empty> {
    let sound = "the measurements that come with the program can be read";
    let sessions = H200.map(|text| rows::parse(text).expect(sound));
    Atlas::new(&sessions)
}

/// Which measured task stands for a model of the public traces, and at which batch size. The first entry whose word
/// begins the model's name counts. Reinforcement learning (a2c, a3c, dqn) waits for its simulators most
/// of the time; the task that leaves the GPU idle most stands for it.
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

/// Which measured service stands for a model. The first whose word begins the model's name counts.
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

/// The measured service that a model is, or that stands for it.
pub(crate) fn service(atlas: &Atlas, model: &str) -> Option<TaskId> {
    let name = model.to_ascii_lowercase().replace(' ', "-");
    let plain: String = name.chars().filter(char::is_ascii_alphanumeric).collect();
    let stand_in = || SERVICES.iter().find(|(word, _)| plain.starts_with(word));
    let known = atlas.task(TaskKind::Serve, &name);
    known.or_else(|| atlas.task(TaskKind::Serve, stand_in()?.1))
}

/// The measured task that a model is, or that stands for it. A measured task has the job's own batch size; a
/// stand-in has one of its own, which then stands for the job's.
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

/// The measured task that each profile is, or that stands for it.
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

/// By how much roommates ask for together, with the demands of measured tasks.
fn utilization(atlas: &Arc<Atlas>, profiles: Profiles<'_>) -> Model {
    let works = works(atlas, profiles);
    let demands = works.iter().map(|w| w.map_or(Demand::default(), |w| demand(atlas, w)));
    (Box::new(Utilization::new(demands.collect())), known(&works))
}

fn table(pairs: &Pairs, profiles: Profiles<'_>) -> Model {
    let names: Vec<&str> = profiles.iter().map(|(name, _)| name.as_str()).collect();
    let (table, known) = pairs.table(&names);
    (Box::new(table), known)
}

impl Truth {
    /// As measured, with a fitted model for what was not.
    pub fn measured(atlas: Arc<Atlas>) -> Self {
        Self(Made::Atlas(measured, atlas))
    }

    /// The same, where it was said which measured task each profile is.
    pub fn mapped(atlas: Arc<Atlas>, works: Vec<Option<Work>>) -> Self {
        Self(Made::Mapped(atlas, works))
    }

    /// The model for profiles of these names, and how many of the names it knows.
    pub fn model(&self, profiles: Profiles<'_>) -> Model {
        match &self.0 {
            Made::Profiles(make) => make(profiles),
            Made::Atlas(make, atlas) => make(atlas, profiles),
            Made::Pairs(make, pairs) => make(pairs, profiles),
            Made::Mapped(atlas, works) => mapped(atlas, works.clone()),
        }
    }

    /// The measurements by which models of traces are known, if it is made of any.
    fn atlas(&self) -> Option<&Atlas> {
        match &self.0 {
            Made::Atlas(_, atlas) => Some(atlas),
            Made::Profiles(_) | Made::Pairs(..) | Made::Mapped(..) => None,
        }
    }

    /// Gives jobs of traces that do not name their models one of the measured tasks, by the job's name; says how
    /// many. Without that all of them would be the same profile to every policy.
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

    /// Fills in what jobs whose batch size may change take of a GPU's memory, where the trace does not say it but
    /// their model was measured.
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

fn demand(atlas: &Atlas, work: Work) -> Demand {
    let footprint = atlas.footprint(work.task, work.batch);
    let counters = atlas.counters(work.task, work.batch);
    Demand {
        sm: counters.sm_util,
        dram: counters.dram_util,
        // Inputs stay on the GPU in our measurements: what crosses the bus is commands, from one thread.
        pcie_mib_s: footprint.launches,
        cpu_cores: 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use roommate_core::idx::JobIdx;
    use roommate_core::knobs::Knobs;
    use roommate_core::state::{Costs, State};

    #[test]
    fn the_example_of_a_truth_halves_the_speed_of_two() {
        let made = turns::ENTRY.build(|| Err(()), || Err(())).unwrap();
        let profiles = [("work".to_string(), Profile::of_step(1.0))];
        let (model, known) = made.model(&profiles);
        let state = State::new(&"1x1".parse().unwrap(), Costs::default());
        let tenants = [(JobIdx(0), Knobs::WHOLE), (JobIdx(1), Knobs::WHOLE)];
        assert_eq!((model.speed(&state, 0, &tenants, 0).mean, known), (0.5, 1));
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
