//! Random scenes from a seed: small clusters, a few jobs, a policy with random parameters. Shared by
//! the laws, the twins and the simulator's twin, so that a seed means the same scene everywhere.

use roommate_core::idx::{Idx, JobIdx, ProfileIdx};
use roommate_core::interference::table::Table;
use roommate_core::job::{Class, Job, Spec};
use roommate_core::math::rng::Rng;
use roommate_core::place::{self, Rule};
use roommate_core::policy::{Entry, Params};
use roommate_core::profile::{Predicted, Profile};
use roommate_core::state::State;
use roommate_core::testing::{Actor, Scene};
use roommate_core::time::{Span, Time};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Nodes and GPUs all alike.
const ALIKE: &[&str] = &["1x1", "1x2", "2x2", "1x4", "3x2", "2x4", "1x8", "3x4", "4x1"];
/// Kinds, node sizes and CPU differ. The kinds without a listed memory take any job.
const MIXED: &[&str] = &[
    "1x4,2x2",
    "1x3,1x2,2x1",
    "1x4,3x1,2x3",
    "2x2:v100,1x4:a100",
    "1x2:v100:4c,2x2:t4",
    "2x4:8c",
    "1x4:a100,2x2:v100:4c",
    "1x1:v100,1x3:a100,1x2:k80",
];

/// What a scene may contain.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "five independent choices")]
pub(crate) struct Taste {
    /// Clusters whose nodes differ.
    pub(crate) mixed: bool,
    /// Jobs that need memory, CPU or a kind of GPU.
    pub(crate) limits: bool,
    /// Starts and restarts that cost time.
    pub(crate) costs: bool,
    /// Jobs that say nothing, or something wrong, about their length.
    pub(crate) liars: bool,
    /// Spreading that slows down, kinds measured to be faster than usual.
    pub(crate) speeds: bool,
    /// Work of which the stages are known, so that jobs may share GPUs.
    pub(crate) stages: bool,
    /// Jobs without a promise among those that have one.
    pub(crate) classes: bool,
}

impl Taste {
    /// Everything.
    pub(crate) const WILD: Self = Self {
        mixed: true,
        limits: true,
        costs: true,
        liars: true,
        speeds: true,
        stages: true,
        classes: true,
    };
    /// GPUs that are all alike, jobs that only count them, changes for free.
    pub(crate) const PLAIN: Self = Self {
        mixed: false,
        limits: false,
        costs: false,
        liars: false,
        speeds: false,
        stages: false,
        classes: false,
    };
}

fn pick<T: Copy>(rng: &mut Rng, from: &[T]) -> T {
    from[rng.below(from.len() as u64) as usize]
}

/// The scene of this seed for this policy.
pub(crate) fn scene(seed: u64, entry: &Entry, taste: Taste) -> Scene {
    let mut rng = Rng::stream(seed, 77);
    let mixed = taste.mixed && rng.chance(0.6);
    let cluster = pick(&mut rng, if mixed { MIXED } else { ALIKE });
    let mut scene = Scene::new(entry.name, cluster, "a 0 1 1");
    scene.seed = seed;
    scene.actors.clear();
    if taste.costs && rng.chance(0.6) {
        scene.costs.restart = whole_seconds(rng.below(6));
        scene.costs.start = whole_seconds(rng.below(3));
    }
    scene.costs.backoff = whole_seconds(rng.below(4));
    scene.profiles = (0..3).map(|_| profile(&mut rng, &scene, taste)).collect();
    if taste.stages {
        give_stages(&mut Rng::stream(seed, 78), &mut scene.profiles);
        give_predictions(&mut Rng::stream(seed, 80), &mut scene.profiles);
    }
    let jobs = 1 + rng.below(12);
    let mut submit = 0;
    for i in 0..jobs {
        submit += pick(&mut rng, &[0, 0, 1, 2, 5, 9]);
        let actor = actor(&mut rng, &scene, taste, i, submit);
        scene.actors.push(actor);
    }
    if taste.classes {
        give_classes(&mut Rng::stream(seed, 81), &mut scene.actors);
    }
    scene.params = params(&mut rng, entry, &scene);
    if taste.stages {
        scene.known_pairs = Some(pairs(&mut Rng::stream(seed, 84)));
    }
    if !taste.liars {
        // Its rounds end with their last step, which is not at a tick.
        scene.params.remove("released");
    }
    scene
}

fn whole_seconds(s: u64) -> Span {
    Span::from_secs(s as f64)
}

fn profile(rng: &mut Rng, scene: &Scene, taste: Taste) -> Profile {
    let mut profile = Profile::of_step(1.0);
    profile.skew = pick(rng, &[None, Some(0.1), Some(0.7)]);
    if taste.speeds {
        profile.spread_speed = pick(rng, &[1.0, 0.5]);
        if rng.chance(0.3) {
            let kind = rng.below(scene.cluster.kinds.len() as u64) as u8;
            profile.kind_speed.push((kind, pick(rng, &[0.5, 4.0])));
        }
    }
    if taste.costs && rng.chance(0.3) {
        profile.restart = Some(whole_seconds(rng.below(6)));
    }
    profile
}

/// Most kinds of work were profiled: a share of the step in each stage.
fn give_stages(rng: &mut Rng, profiles: &mut [Profile]) {
    for profile in profiles {
        if rng.chance(0.8) {
            let shares: [f64; 4] = std::array::from_fn(|_| rng.below(6) as f64 / 8.0);
            profile.stages_s = Some(shares);
        }
    }
}

/// Of most kinds of work something was predicted, also what no GPU here could hold.
fn give_predictions(rng: &mut Rng, profiles: &mut [Profile]) {
    for profile in profiles {
        if rng.chance(0.8) {
            let sm_util = (1 + rng.below(10)) as f64 / 10.0;
            let mem_mib = pick(rng, &[500, 4_000, 9_000, 100_000]);
            let sm_util_max = (sm_util + rng.unit() * 0.2).min(1.0);
            profile.predicted =
                Some(Predicted { sm_util, sm_util_max, std: 0.1, dram_util: 0.1, mem_mib });
        }
    }
}

/// Somebody measured most pairs of kinds of work, and some do not fit together.
fn pairs(rng: &mut Rng) -> Table {
    let mut pairs = BTreeMap::new();
    for a in 0..3 {
        for b in a..3 {
            let speeds = [0, 1].map(|_| pick(rng, &[0.0, 0.3, 0.6, 0.9, 1.0]));
            if rng.chance(0.8) {
                pairs.insert((ProfileIdx(a), ProfileIdx(b)), speeds);
            }
        }
    }
    Table::new(pairs, 0.0)
}

fn give_classes(rng: &mut Rng, actors: &mut [Actor]) {
    for actor in actors {
        if rng.chance(0.4) {
            actor.spec.class = Class::BestEffort;
        }
    }
}

fn actor(rng: &mut Rng, scene: &Scene, taste: Taste, i: u64, submit: u64) -> Actor {
    let all = u64::from(scene.cluster.gpus());
    let gpus = match rng.below(20) {
        0 => all + 1 + rng.below(3),
        1..=9 => 1 + rng.below(all.min(2)),
        _ => 1 + rng.below(all),
    };
    let work = (1 + rng.below(20)) as f64;
    let profile = ProfileIdx(rng.below(scene.profiles.len() as u64) as u32);
    let mut spec = Spec::training(gpus as u16, work, profile);
    spec.retries = rng.below(4) as u16;
    if rng.chance(0.2) {
        spec.deadline = Some(Time::from_secs((submit + rng.below(40)) as f64));
    }
    if taste.liars && rng.chance(0.3) {
        spec.work = rng.chance(0.5).then(|| work + rng.below(5) as f64 - 2.0);
        spec.work = spec.work.map(|w| w.max(0.0));
    }
    if taste.limits && rng.chance(0.4) {
        spec.knobs.mem_mib = pick(rng, &[0, 9_000, 14_000, 30_000]);
        spec.knobs.cpu_milli = pick(rng, &[0, 1_000, 2_000, 3_000]);
        if rng.chance(0.3) {
            spec.kinds = 1 << rng.below(scene.cluster.kinds.len() as u64);
        }
    }
    // A job that no rule could ever place would wait for ever, and rightly so; one that is too large
    // is refused by the engine. Everything in between is made placeable by asking for less.
    let relax: [fn(&mut Spec); 3] = [
        |s| (s.knobs.mem_mib, s.knobs.cpu_milli) = (0, 0),
        |s| s.kinds = u32::MAX,
        |s| (s.gpus, s.gpus_max) = (1, 1),
    ];
    for relax in relax {
        let could = |rule| fits_an_empty_cluster(scene, &spec, rule);
        if could(Rule::Count) && !could(Rule::Consolidated) {
            relax(&mut spec);
        }
    }
    Actor { name: format!("j{i}"), submit, spec, work }
}

/// Whether the job could be placed if it were alone.
pub(crate) fn fits_an_empty_cluster(scene: &Scene, spec: &Spec, rule: Rule) -> bool {
    let mut state = State::new(&scene.cluster, scene.costs);
    state.profiles.clone_from(&scene.profiles);
    state.specs.push(spec.clone());
    state.jobs.push(Job::expected());
    place::find(&state, JobIdx::from_usize(0), rule).is_some()
}

fn params(rng: &mut Rng, entry: &Entry, scene: &Scene) -> Params {
    let mut params = Params::new();
    let known = entry.params(&params).expect("defaults are valid");
    let mut set = |name: &str, value: Value| {
        if known.get(name).is_some() && !value.is_null() {
            params.insert(name.into(), value);
        }
    };
    set("rule", json!(pick(rng, &["consolidated", "first_fit", "spread", "count"])));
    set("repack", json!(rng.chance(0.3)));
    let mut own = Rng::stream(scene.seed, 79);
    set("packing", json!(1 + own.below(4)));
    set("autopack", json!(own.chance(0.5)));
    set("guard", json!(own.chance(0.5)));
    set("weight", json!(pick(&mut own, &["gain", "efficiency"])));
    set_gandiva(&mut Rng::stream(scene.seed, 80), &mut set);
    set("quota_gpus", json!(pick(&mut own, &[None, Some(1), Some(3), Some(8)])));
    set("wait_to_opportunist_s", json!(pick(&mut own, &[None, Some(2.0), Some(7.0)])));
    set("util_default", json!(pick(&mut own, &[0.1, 0.3, 0.9])));
    set("eps", json!(pick(&mut own, &[0.0, 0.01, 0.2])));
    set("min_memory", json!(pick(&mut own, &[0.0, 0.1, 1.0])));
    set("stall_s", json!(pick(&mut own, &[3.0, 20.0])));
    set_gavel(&mut Rng::stream(scene.seed, 83), entry, &mut set);
    let mut own = Rng::stream(scene.seed, 82);
    set("count_weight", json!(pick(&mut own, &[0.0, 1.0])));
    set("mem_term", json!(pick(&mut own, &["intended", "released"])));
    set("max_tasks", json!(1 + own.below(5)));
    set("mem_margin_mib", json!(pick(&mut own, &[0, 500, 20_000])));
    set("window", json!(1 + own.below(5)));
    set("cap_resident", json!(own.chance(0.5)));
    set("overcommit_cap", pick(&mut own, &[&Value::Null, &json!(100), &json!(150)]).clone());
    set("migrate", json!(own.chance(0.4)));
    set("migrate_pause_s", json!(pick(&mut own, &[0, 3, 300])));
    set("placement", json!(pick(rng, &["profile", "consolidated", "count"])));
    set("service", json!(pick(rng, &["gpu_time", "time"])));
    set(
        "quantum",
        pick(rng, &[&json!("bound"), &json!("to_bound"), &json!({"fixed": 7.0})]).clone(),
    );
    let past: Vec<u64> = (0..rng.below(30)).map(|_| rng.below(60)).collect();
    set("min_history", json!(past.len() as u64 + rng.below(4)));
    set("history_gpu_s", json!(past));
    let gittins = known.get("order") == Some(&json!("gittins"));
    let knob = rng.chance(0.5);
    // A job that is promoted must get something done before it is demoted again; if restarts take
    // longer than the first queue lasts, 2D-LAS swaps two jobs for ever, as published. Under Gittins
    // jobs of one queue swap too, so there only free restarts are safe.
    let of_profiles = scene.profiles.iter().filter_map(|p| p.restart).max().unwrap_or_default();
    let cost = scene.costs.restart.max(scene.costs.start).max(of_profiles).secs() as u64;
    let widest = scene.actors.iter().map(|a| u64::from(a.spec.gpus)).max().unwrap_or(1);
    let least = if knob { (cost + 1) * widest } else { 1 };
    let mut bound = 0;
    let bounds: Vec<u64> = (0..=rng.below(3))
        .map(|_| {
            bound += least + rng.below(30);
            bound
        })
        .collect();
    set("bounds_gpu_s", json!(bounds));
    if knob && !(gittins && cost > 0) {
        set("promote_knob", json!(pick(rng, &[0.5, 1.0, 2.0, 8.0])));
    }
    params
}

/// Whole seconds, so that everything falls on ticks.
fn set_gandiva(rng: &mut Rng, set: &mut dyn FnMut(&str, Value)) {
    set("slice_s", json!(1 + rng.below(6)));
    set("scan_s", json!(1 + rng.below(6)));
    set("max_height", json!(1 + rng.below(4)));
    set("pack", json!(rng.chance(0.7)));
    set("pack_util_cap", json!(pick(rng, &[0.9, 1.0, 1.5, 2.0])));
    set("trial_steps", json!(rng.below(4)));
    set("trial_skip", json!(rng.below(2)));
    set("trial_s", json!(1 + rng.below(3)));
    set("keep_gain", json!(pick(rng, &[0.5, 1.05, 2.5])));
    set("stale_s", json!(pick(rng, &[5, 20, 3_600])));
    set("refuse_s", json!(pick(rng, &[2, 10, 3_600])));
    set("migrate", json!(rng.chance(0.7)));
    set("migrate_gain", json!(pick(rng, &[0.0, 0.05, 0.5, 2.0])));
    set("defrag_stop", json!(pick(rng, &[0.25, 0.5, 0.75])));
    set("cool_s", json!(pick(rng, &[0, 3, 20])));
    set("balance_s", json!(pick(rng, &[None, Some(1), Some(3), Some(7)])));
}

/// All goals, on the one entry that has no goal of its own.
fn set_gavel(rng: &mut Rng, entry: &Entry, set: &mut dyn FnMut(&str, Value)) {
    set("round_s", json!(1 + rng.below(6)));
    set("reset_s", json!(rng.below(12)));
    let goals = [
        "las",
        "water_filling",
        "hierarchical",
        "finish_time",
        "makespan",
        "throughput",
        "cost",
        "fifo",
        "isolated",
    ];
    let goal = pick(rng, &goals);
    if entry.name == "gavel" {
        set("objective", json!(goal));
        set("packed", json!(matches!(goal, "las" | "makespan") && rng.chance(0.3)));
    }
    set("aware", json!(rng.chance(0.7)));
    set("deadlines", json!(rng.chance(0.5)));
    set("choice", json!(pick(rng, &["fastest", "random", "released"])));
    set("released", json!(rng.chance(0.3)));
}

/// The scene in a few lines, to read and to replay by hand.
pub(crate) fn compact(scene: &Scene) -> String {
    let mut text = format!(
        "seed {} {} {} on {} restart {} start {} backoff {}\n",
        scene.seed,
        scene.policy,
        Value::Object(scene.params.clone()),
        scene.cluster,
        scene.costs.restart,
        scene.costs.start,
        scene.costs.backoff,
    );
    for a in &scene.actors {
        let s = &a.spec;
        write!(text, "  {} at {} gpus {} work {}", a.name, a.submit, s.gpus, a.work).expect("text");
        write!(text, " declares {:?} {:?} kinds {:x}", s.work, s.profile, s.kinds).expect("text");
        writeln!(text, " mem {} cpu {}", s.knobs.mem_mib, s.knobs.cpu_milli).expect("text");
    }
    for (i, p) in scene.profiles.iter().enumerate() {
        writeln!(text, "  profile {i}: {p:?}").expect("text");
    }
    text
}
