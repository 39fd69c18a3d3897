//! Published mixes of job sizes and durations, as shares and quantiles; no rows of the traces.

use super::named;
use roommate_core::math::rng::Rng;

/// The published mix that the jobs imitate. Sizes larger than the cluster are left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mix {
    /// Roommate's own mix for demonstrations: up to 8 GPUs, half a minute to two hours.
    #[default]
    Small,
    /// Completed jobs of Microsoft Philly (Jeon et al., ATC 2019; data CC-BY-4.0): 93 % ask for one
    /// GPU, while 8-GPU jobs use half of the GPU time.
    Philly,
    /// GPU jobs of `SenseTime` Helios' cluster Venus (Hu et al., SC 2021; data CC-BY-4.0),
    /// durations cut at 48 h as in the source file: a quarter use whole nodes, half end within 204
    /// s.
    Helios,
    /// Finished GPU tasks of Alibaba PAI (Weng et al., NSDI 2022; data CC-BY-4.0), fractions of a
    /// GPU counted as one: three quarters on one GPU, and sizes that are not powers of two.
    Pai,
    /// The 60-job example of Tiresias (Gu et al., NSDI 2019; Apache-2.0): half on 1 GPU, a sixth
    /// each on 2, 4 and 8, all within minutes.
    Tiresias,
}

named!(
    Mix,
    "mix",
    Small = "small",
    Philly = "philly",
    Helios = "helios",
    Pai = "pai",
    Tiresias = "tiresias"
);

/// Jobs of similar size: the frequency of each size, and their run times.
struct Group {
    /// GPUs, and per mille of all jobs.
    sizes: &'static [(u32, f64)],
    /// Cumulative distribution of run times: (share of jobs, seconds), log-linear between two
    /// points. The first point is the shortest job (share 0), the last the longest (share 1).
    seconds: Quantiles,
}

/// (share of jobs, seconds within which that share ends).
type Quantiles = &'static [(f64, f64)];

/// Counted in the published file (completed jobs), rounded to two digits.
const PHILLY: [Group; 4] = [
    Group {
        sizes: &[(1, 931.7)],
        seconds: &[
            (0.0, 1.0),
            (0.01, 30.0),
            (0.1, 62.0),
            (0.25, 120.0),
            (0.5, 1_100.0),
            (0.75, 2_700.0),
            (0.9, 8_500.0),
            (0.95, 19_000.0),
            (0.99, 140_000.0),
            (0.999, 860_000.0),
            (1.0, 2e6),
        ],
    },
    Group {
        sizes: &[(2, 22.1), (4, 22.7)],
        seconds: &[
            (0.0, 1.0),
            (0.01, 6.0),
            (0.1, 15.0),
            (0.25, 21.0),
            (0.5, 370.0),
            (0.75, 45_000.0),
            (0.9, 170_000.0),
            (0.95, 230_000.0),
            (0.99, 750_000.0),
            (1.0, 2.1e6),
        ],
    },
    Group {
        sizes: &[(8, 20.0)],
        seconds: &[
            (0.0, 10.0),
            (0.01, 33.0),
            (0.1, 220.0),
            (0.25, 1_900.0),
            (0.5, 24_000.0),
            (0.75, 170_000.0),
            (0.9, 350_000.0),
            (0.95, 530_000.0),
            (0.99, 1.1e6),
            (1.0, 2.7e6),
        ],
    },
    Group {
        sizes: &[(16, 2.4), (32, 0.8), (64, 0.1)],
        seconds: &[
            (0.0, 1.0),
            (0.01, 2.0),
            (0.1, 69.0),
            (0.25, 570.0),
            (0.5, 21_000.0),
            (0.75, 100_000.0),
            (0.9, 250_000.0),
            (0.95, 440_000.0),
            (0.99, 890_000.0),
            (1.0, 1.4e6),
        ],
    },
];

/// Counted in the published file, rounded to two digits; sizes below 0.2 % left out.
const HELIOS: [Group; 4] = [
    Group {
        sizes: &[(1, 518.4)],
        seconds: &[
            (0.0, 1.0),
            (0.01, 1.1),
            (0.1, 17.0),
            (0.25, 67.0),
            (0.5, 190.0),
            (0.75, 1_200.0),
            (0.9, 8_400.0),
            (0.95, 33_000.0),
            (0.985, 172_799.0),
            (1.0, 172_800.0),
        ],
    },
    Group {
        sizes: &[(2, 55.5), (4, 72.6)],
        seconds: &[
            (0.0, 1.0),
            (0.01, 1.1),
            (0.1, 15.0),
            (0.25, 63.0),
            (0.5, 190.0),
            (0.75, 1_900.0),
            (0.9, 45_000.0),
            (0.95, 120_000.0),
            (0.97, 172_799.0),
            (1.0, 172_800.0),
        ],
    },
    Group {
        sizes: &[(8, 247.3)],
        seconds: &[
            (0.0, 1.0),
            (0.01, 1.1),
            (0.1, 26.0),
            (0.25, 98.0),
            (0.5, 220.0),
            (0.75, 1_200.0),
            (0.9, 26_000.0),
            (0.95, 66_000.0),
            (0.985, 172_799.0),
            (1.0, 172_800.0),
        ],
    },
    Group {
        sizes: &[(16, 41.6), (24, 9.0), (32, 27.2), (40, 2.9), (48, 2.5), (64, 2.3), (128, 3.8)],
        seconds: &[
            (0.0, 1.0),
            (0.01, 1.1),
            (0.1, 10.0),
            (0.25, 65.0),
            (0.5, 250.0),
            (0.75, 2_500.0),
            (0.9, 50_000.0),
            (0.95, 110_000.0),
            (0.975, 172_799.0),
            (1.0, 172_800.0),
        ],
    },
];

/// Counted in the published sample, rounded to two digits; sizes below 0.6 % left out.
const PAI: [Group; 4] = [
    Group {
        sizes: &[(1, 770.1)],
        seconds: &[
            (0.0, 5.0),
            (0.01, 18.0),
            (0.1, 35.0),
            (0.25, 94.0),
            (0.5, 470.0),
            (0.75, 3_200.0),
            (0.9, 11_000.0),
            (0.95, 20_000.0),
            (0.99, 58_000.0),
            (1.0, 172_800.0),
        ],
    },
    Group {
        sizes: &[(2, 30.8), (3, 15.0), (4, 14.1)],
        seconds: &[
            (0.0, 5.0),
            (0.01, 24.0),
            (0.1, 57.0),
            (0.25, 150.0),
            (0.5, 540.0),
            (0.75, 2_600.0),
            (0.9, 11_000.0),
            (0.95, 32_000.0),
            (0.99, 98_000.0),
            (1.0, 172_800.0),
        ],
    },
    Group {
        sizes: &[(5, 17.1), (8, 12.0)],
        seconds: &[
            (0.0, 5.0),
            (0.01, 46.0),
            (0.1, 81.0),
            (0.25, 190.0),
            (0.5, 1_400.0),
            (0.75, 6_400.0),
            (0.9, 19_000.0),
            (0.95, 40_000.0),
            (0.99, 150_000.0),
            (1.0, 172_800.0),
        ],
    },
    Group {
        sizes: &[
            (10, 40.1),
            (12, 8.0),
            (16, 9.2),
            (20, 21.3),
            (25, 6.3),
            (30, 9.3),
            (40, 7.0),
            (50, 14.4),
        ],
        seconds: &[
            (0.0, 5.0),
            (0.01, 44.0),
            (0.1, 170.0),
            (0.25, 440.0),
            (0.5, 1_800.0),
            (0.75, 6_300.0),
            (0.9, 19_000.0),
            (0.95, 32_000.0),
            (0.99, 80_000.0),
            (1.0, 172_800.0),
        ],
    },
];

/// Counted in the published file.
const TIRESIAS: [Group; 1] = [Group {
    sizes: &[(1, 500.0), (2, 166.7), (4, 166.7), (8, 166.6)],
    seconds: &[
        (0.0, 120.0),
        (0.25, 121.0),
        (0.5, 125.0),
        (0.75, 147.0),
        (0.9, 210.0),
        (0.95, 305.0),
        (1.0, 1_800.0),
    ],
}];

/// Chosen for demonstrations.
const SMALL: [Group; 1] = [Group {
    sizes: &[(1, 600.0), (2, 200.0), (4, 150.0), (8, 50.0)],
    seconds: &[(0.0, 30.0), (0.5, 300.0), (0.9, 1_800.0), (1.0, 7_200.0)],
}];

impl Mix {
    fn groups(self) -> &'static [Group] {
        match self {
            Mix::Small => &SMALL,
            Mix::Philly => &PHILLY,
            Mix::Helios => &HELIOS,
            Mix::Pai => &PAI,
            Mix::Tiresias => &TIRESIAS,
        }
    }
}

/// Mean of the distribution through the given points.
fn mean_s(points: &[(f64, f64)]) -> f64 {
    let part = |w: &[(f64, f64)]| {
        let [(p0, s0), (p1, s1)] = [w[0], w[1]];
        // A segment is uniform in the logarithm; its mean is the logarithmic mean of its ends.
        let mean = if s1 / s0 - 1.0 < 1e-9 { s0 } else { (s1 - s0) / (s1 / s0).ln() };
        (p1 - p0) * mean
    };
    points.windows(2).map(part).sum()
}

/// The value below which the share `p` lies, in the distribution through the given points.
pub(crate) fn quantile(points: &[(f64, f64)], p: f64) -> f64 {
    let i = points.partition_point(|(share, _)| *share <= p).clamp(1, points.len() - 1);
    let [(p0, s0), (p1, s1)] = [points[i - 1], points[i]];
    s0 * ((p - p0) / (p1 - p0) * (s1 / s0).ln()).exp()
}

/// The sizes of a mix that fit the cluster.
pub(super) struct Choices {
    /// Cumulative weight, GPUs, run times.
    sizes: Vec<(f64, u32, Quantiles)>,
    /// Mean GPU-seconds of a job.
    pub(super) mean_gpu_s: f64,
}

impl Choices {
    pub(super) fn new(mix: Mix, cluster_gpus: u32) -> Self {
        let mut sizes = Vec::new();
        let (mut total, mut gpu_s) = (0.0, 0.0);
        for group in mix.groups() {
            for &(gpus, weight) in group.sizes.iter().filter(|(gpus, _)| *gpus <= cluster_gpus) {
                total += weight;
                gpu_s += weight * f64::from(gpus) * mean_s(group.seconds);
                sizes.push((total, gpus, group.seconds));
            }
        }
        Self { sizes, mean_gpu_s: gpu_s / total }
    }

    pub(super) fn draw(&self, rng: &mut Rng) -> (u32, f64) {
        let total = self.sizes.last().expect("every mix has jobs of one GPU").0;
        let at = rng.unit() * total;
        let i = self.sizes.partition_point(|(sum, ..)| *sum <= at).min(self.sizes.len() - 1);
        let (_, gpus, seconds) = self.sizes[i];
        (gpus, quantile(seconds, rng.unit()))
    }
}
