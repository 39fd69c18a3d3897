//! Random cases from a seed: small clusters, a few jobs, a policy with random parameters. Shared by
//! the laws, the twins and the simulator's twin, so that a seed means the same case everywhere.

use roommate_core::idx::{Idx, JobIdx, ProfileIdx};
use roommate_core::interference::table::Table;
use roommate_core::job::{Class, Job, Spec};
use roommate_core::math::rng::Rng;
use roommate_core::number::{Number, Positive};
use roommate_core::performance::goodput::{Noise, Training};
use roommate_core::performance::sensitivity::{Host, Sensitivity};
use roommate_core::placement::{self, Rule};
use roommate_core::policy::{Entry, FuzzCase};
use roommate_core::profile::{Predicted, Profile};
use roommate_core::state::State;
use roommate_core::testing::{TestCase, TestJob};
use roommate_core::time::{Span, Time};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Clusters of equal nodes and GPUs.
const ALIKE: &[&str] = &["1x1", "1x2", "2x2", "1x4", "3x2", "2x4", "1x8", "3x4", "4x1"];
/// GPU models, node sizes and CPU differ. GPU models without a listed memory accept any job.
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

/// Mixed clusters with host memory, for policies that allocate it.
const HOSTED: &[&str] = &[
    "2x4:8c:64g",
    "1x2:v100:4c:32g,2x2:t4:16c:48g",
    "3x2:6c:20g",
    "1x4:12c:100g,2x2",
    "1x3:2c:8g",
];

/// What a case may contain.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "independent choices")]
pub(crate) struct CaseOptions {
    /// Clusters whose nodes differ.
    pub(crate) mixed: bool,
    /// Jobs that need memory, CPU or a GPU model.
    pub(crate) limits: bool,
    /// Starts and restarts that cost time.
    pub(crate) costs: bool,
    /// Jobs with no declared length, or a wrong one.
    pub(crate) liars: bool,
    /// Spreading that slows down, GPU models measured to be faster than their default.
    pub(crate) speeds: bool,
    /// Profiles with known stages, so that jobs may share GPUs.
    pub(crate) stages: bool,
    /// Best-effort jobs among guaranteed ones.
    pub(crate) classes: bool,
    /// Jobs that can use more GPUs than they request.
    pub(crate) elastic: bool,
}

impl CaseOptions {
    /// All options.
    pub(crate) const WILD: Self = Self {
        mixed: true,
        limits: true,
        costs: true,
        liars: true,
        speeds: true,
        stages: true,
        classes: true,
        elastic: true,
    };
    /// Equal GPUs, jobs that request nothing else, changes without cost.
    pub(crate) const PLAIN: Self = Self {
        mixed: false,
        limits: false,
        costs: false,
        liars: false,
        speeds: false,
        stages: false,
        classes: false,
        elastic: false,
    };
}

fn pick<T: Copy>(rng: &mut Rng, from: &[T]) -> T {
    from[rng.below(from.len() as u64) as usize]
}

/// The case of this seed for this policy.
pub(crate) fn case(seed: u64, entry: &Entry, options: CaseOptions) -> TestCase {
    let mut rng = Rng::stream(seed, 77);
    let mixed = options.mixed && rng.chance(0.6);
    let mut cluster = pick(&mut rng, if mixed { MIXED } else { ALIKE });
    let mut hosts = Rng::stream(seed, 83);
    let is_synergy = entry.name.starts_with("synergy");
    if mixed && is_synergy && hosts.chance(0.7) {
        cluster = pick(&mut hosts, HOSTED);
    }
    let mut case = TestCase::new(entry.name, cluster, "a 0 1 1");
    case.seed = seed;
    case.jobs.clear();
    if options.costs && rng.chance(0.6) {
        case.costs.restart = whole_seconds(rng.below(6));
        case.costs.start = whole_seconds(rng.below(3));
    }
    case.costs.backoff = whole_seconds(rng.below(4));
    case.profiles = (0..3).map(|_| profile(&mut rng, &case, options)).collect();
    if options.stages {
        give_stages(&mut Rng::stream(seed, 78), &mut case.profiles);
        give_predictions(&mut Rng::stream(seed, 80), &mut case.profiles);
        give_sensitivities(&mut hosts, &mut case.profiles);
    }
    let jobs = 1 + rng.below(12);
    let mut submit = 0;
    for i in 0..jobs {
        submit += pick(&mut rng, &[0, 0, 1, 2, 5, 9]);
        let mut job = job(&mut rng, &case, options, i, submit);
        if is_synergy && options.limits && hosts.chance(0.3) {
            job.spec.knobs.host_mib = pick(&mut hosts, &[1_000, 6_000, 9_000]);
        }
        case.jobs.push(job);
    }
    if options.stages && entry.name.starts_with("iadeep") {
        give_trainings(&mut Rng::stream(seed, 100), &mut case.profiles);
    }
    if options.classes {
        give_classes(&mut Rng::stream(seed, 81), &mut case.jobs);
    }
    if options.elastic {
        make_elastic(&mut Rng::stream(seed, 84), &mut case);
    }
    give_retries(&mut Rng::stream(seed, 86), &mut case.jobs);
    give_worth(&mut Rng::stream(seed, 87), &mut case.jobs);
    let fuzz_case = fuzz_case(&case, !options.liars);
    case.params = entry.fuzz(&mut Rng::stream(seed, 79), fuzz_case).expect("defaults are valid");
    if options.stages {
        case.known_pairs = Some(pairs(&mut Rng::stream(seed, 88)));
    }
    case
}

fn whole_seconds(s: u64) -> Span {
    Span::from_secs(s as f64)
}

fn profile(rng: &mut Rng, case: &TestCase, options: CaseOptions) -> Profile {
    let mut profile = Profile::of_step(1.0);
    profile.skew = pick(rng, &[None, Some(0.1), Some(0.7)]);
    if options.speeds {
        profile.spread_speed = Positive::of(pick(rng, &[1.0, 0.5]));
        if rng.chance(0.3) {
            let gpu_model = rng.below(case.cluster.gpu_models.len() as u64) as u8;
            profile.model_speed.push((gpu_model, Positive::of(pick(rng, &[0.5, 4.0]))));
        }
    }
    if options.costs && rng.chance(0.3) {
        profile.restart = Some(whole_seconds(rng.below(6)));
    }
    profile
}

/// Gives most profiles stages: a share of the step in each.
fn give_stages(rng: &mut Rng, profiles: &mut [Profile]) {
    for profile in profiles {
        if rng.chance(0.8) {
            let shares: [f64; 4] = std::array::from_fn(|_| rng.below(6) as f64 / 8.0);
            profile.stages_s = Some(shares.map(Number::of));
        }
    }
}

/// Gives most profiles predictions, including some that no GPU here could hold.
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

/// Measured speeds of most pairs of profiles; some pairs do not fit together.
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

/// Makes most profiles faster with more CPU or more host memory.
fn give_sensitivities(rng: &mut Rng, profiles: &mut [Profile]) {
    for profile in profiles {
        let gain = |rng: &mut Rng| pick(rng, &[0.0, 0.25, 1.0]);
        let (by_cpu, by_mib) = (gain(rng), gain(rng));
        let (cpu, mib) = ([500, 2_000, 6_000], [2_000, 10_000]);
        let speed = |c: usize, m: usize| (1.0 + by_cpu * c as f64) * (1.0 + by_mib * m as f64);
        let speeds = (0..3).flat_map(|c| (0..2).map(move |m| (c, m))).map(|(c, m)| speed(c, m));
        let usual = Host { cpu_milli: 500, mib: 2_000 };
        let known = Sensitivity::new(cpu.into(), mib.into(), speeds.collect(), usual, None);
        profile.sensitivity = known.filter(|_| rng.chance(0.7)).map(Box::new);
    }
}

/// Allows other batch sizes for some profiles; the memory at their own fits everywhere.
fn give_trainings(rng: &mut Rng, profiles: &mut [Profile]) {
    for profile in profiles {
        if rng.chance(0.7) {
            let batch = pick(rng, &[1, 2, 8, 32, 1024]);
            let start = pick(rng, &[0.0, 10.0, 1_000.0]);
            let end = start * pick(rng, &[1.0, 1.0, 4.0, 0.25]);
            let memory = vec![(batch, 2_000), (4 * batch, pick(rng, &[2_000, 6_000, 20_000]))];
            profile.training = Some(Training {
                noise: Noise { start, end },
                memory: if rng.chance(0.7) { memory } else { Vec::new() },
                ..Training::around(batch, 0.0)
            });
        }
    }
}

fn give_classes(rng: &mut Rng, jobs: &mut [TestJob]) {
    for job in jobs {
        if rng.chance(0.4) {
            job.spec.class = Class::BestEffort;
        }
    }
}

/// Makes some jobs elastic, with more or less speedup, and also beyond the size of the cluster.
fn make_elastic(rng: &mut Rng, case: &mut TestCase) {
    for profile in &mut case.profiles {
        profile.scaling = pick(rng, &[None, Some(0.0), Some(0.3), Some(0.7), Some(1.0)]);
    }
    for job in &mut case.jobs {
        if rng.chance(0.4) {
            job.spec.gpus_max += 1 + rng.below(7) as u16;
        }
    }
}

/// Gives some classes of failure more retries than others.
fn give_retries(rng: &mut Rng, jobs: &mut [TestJob]) {
    for job in jobs {
        if rng.chance(0.3) {
            job.spec.retries.user = 0;
            job.spec.retries.infra = rng.below(6) as u16;
        }
    }
}

/// Gives some jobs with a deadline earlier deadlines of higher value.
fn give_worth(rng: &mut Rng, jobs: &mut [TestJob]) {
    for job in jobs {
        if let Some(last) = job.spec.deadline
            && rng.chance(0.4)
        {
            let sooner = Time(last.0.saturating_sub(1_000_000 * rng.below(20)));
            job.spec.deadline_values = vec![(sooner, Number::of(10.0)), (last, Number::of(8.0))];
        }
    }
}

fn job(rng: &mut Rng, case: &TestCase, options: CaseOptions, i: u64, submit: u64) -> TestJob {
    let all = u64::from(case.cluster.gpus());
    let gpus = match rng.below(20) {
        0 => all + 1 + rng.below(3),
        1..=9 => 1 + rng.below(all.min(2)),
        _ => 1 + rng.below(all),
    };
    let work = (1 + rng.below(20)) as f64;
    let profile = ProfileIdx(rng.below(case.profiles.len() as u64) as u32);
    let mut spec = Spec::training(gpus as u16, work, profile);
    spec.retries = (rng.below(4) as u16).into();
    if rng.chance(0.2) {
        spec.deadline = Some(Time::from_secs((submit + rng.below(40)) as f64));
    }
    if options.liars && rng.chance(0.3) {
        spec.work = rng.chance(0.5).then(|| Number::of(work + rng.below(5) as f64 - 2.0));
    }
    if options.limits && rng.chance(0.4) {
        spec.knobs.mem_mib = pick(rng, &[0, 9_000, 14_000, 30_000]);
        spec.knobs.cpu_milli = pick(rng, &[0, 1_000, 2_000, 3_000]);
        if rng.chance(0.3) {
            spec.gpu_models = 1 << rng.below(case.cluster.gpu_models.len() as u64);
        }
    }
    // A job that no rule could ever place would wait for ever; one that is too large is rejected by
    // the engine. Every job in between is made placeable by requesting less.
    let relax: [fn(&mut Spec); 3] = [
        |s| (s.knobs.mem_mib, s.knobs.cpu_milli) = (0, 0),
        |s| s.gpu_models = u32::MAX,
        |s| (s.gpus, s.gpus_max) = (1, 1),
    ];
    for relax in relax {
        let could = |rule| fits_an_empty_cluster(case, &spec, rule);
        if could(Rule::Count) && !could(Rule::Consolidated) {
            relax(&mut spec);
        }
    }
    TestJob { name: format!("j{i}"), submit, spec, work }
}

/// Whether the job could be placed in an empty cluster.
pub(crate) fn fits_an_empty_cluster(case: &TestCase, spec: &Spec, rule: Rule) -> bool {
    let mut state = State::new(&case.cluster, case.costs);
    state.profiles = case.profiles.clone().into();
    state.specs.push(spec.clone());
    state.jobs.push(Job::expected());
    placement::find(&state, JobIdx::from_usize(0), rule).is_some()
}

/// What parameters have to heed in this case.
fn fuzz_case(case: &TestCase, on_ticks: bool) -> FuzzCase {
    let of_profiles = case.profiles.iter().filter_map(|p| p.restart).max().unwrap_or_default();
    let restart = case.costs.restart.max(case.costs.start).max(of_profiles);
    let widest = case.jobs.iter().map(|a| u64::from(a.spec.gpus)).max().unwrap_or(1);
    FuzzCase { restart_s: restart.secs() as u64, widest, on_ticks }
}

/// The case in a few lines, to read and to replay by hand.
pub(crate) fn compact(case: &TestCase) -> String {
    let mut text = format!(
        "seed {} {} {} on {} restart {} start {} backoff {}\n",
        case.seed,
        case.policy,
        Value::Object(case.params.clone()),
        case.cluster,
        case.costs.restart,
        case.costs.start,
        case.costs.backoff,
    );
    for a in &case.jobs {
        let s = &a.spec;
        write!(text, "  {} at {} gpus {}", a.name, a.submit, s.gpus).expect("text");
        write!(text, "..={} work {}", s.gpus_max, a.work).expect("text");
        write!(text, " declares {:?} {:?} gpu_models {:x}", s.work, s.profile, s.gpu_models)
            .expect("text");
        write!(
            text,
            " mem {} cpu {} host {}",
            s.knobs.mem_mib, s.knobs.cpu_milli, s.knobs.host_mib
        )
        .expect("text");
        writeln!(text, " due {:?} {:?}", s.deadline, s.deadline_values).expect("text");
    }
    for (i, p) in case.profiles.iter().enumerate() {
        writeln!(text, "  profile {i}: {p:?}").expect("text");
    }
    text
}
