//! Weights of the published policy: group time, inflation and efficiency in their exact order of
//! operations, for the 8-GPU stage profiles.

/// Seconds of storage and CPU, GPU, network.
pub(super) type Stages = (f64, f64, f64);

/// vgg16, vgg19, resnet18, shufflenet, bert, gpt2, a2c, dqn on 8 GPUs, milliseconds / 1000.
pub(super) const PROFILES: [Stages; 8] = [
    (82.0 / 1000.0, 75.0 / 1000.0, 66.0 / 1000.0),
    (82.0 / 1000.0, 88.0 / 1000.0, 60.0 / 1000.0),
    (784.0 / 1000.0, 117.0 / 1000.0, 77.0 / 1000.0),
    (769.0 / 1000.0, 57.0 / 1000.0, 10.0 / 1000.0),
    (0.5 / 1000.0, 167.0 / 1000.0, 59.0 / 1000.0),
    (0.6 / 1000.0, 419.0 / 1000.0, 49.0 / 1000.0),
    (502.0 / 1000.0, 14.0 / 1000.0, 0.4 / 1000.0),
    (435.0 / 1000.0, 8.0 / 1000.0, 0.5 / 1000.0),
];

/// R = resnet18, S = shufflenet.
pub(super) fn group(members: &str) -> Vec<Stages> {
    members.chars().map(|c| if c == 'R' { PROFILES[2] } else { PROFILES[3] }).collect()
}

fn cycle(order: &[Stages]) -> f64 {
    let mut f = [0.0f64; 9];
    for s in 0..8 {
        let mut end = 0.0f64;
        if let Some(job) = order.get((s + 1) % 4) {
            end = end.max(f[s] + job.2);
        }
        if let Some(job) = order.get((s + 2) % 4) {
            end = end.max(f[s] + job.1);
        }
        if let (Some(job), true) = (order.get((s + 3) % 4), s > 0) {
            end = end.max(f[s - 1] + job.0);
        }
        f[s + 1] = end;
        if s >= 4 {
            let (now, before) = (f[s + 1] - f[s - 3], f[s] - f[s - 4]);
            if (now - before).abs() <= 1e-3 * now.abs().max(before.abs()) && now > 0.0 {
                return now;
            }
        }
    }
    f[8] - f[4]
}

fn best(order: &mut [Stages], fixed: usize) -> f64 {
    if fixed == order.len() {
        return cycle(order);
    }
    let mut least = f64::INFINITY;
    for i in fixed..order.len() {
        order.swap(fixed, i);
        least = least.min(best(order, fixed + 1));
        order.swap(fixed, i);
    }
    least
}

/// Efficiency of a group of two to four, best ordering, inflated.
pub(super) fn gamma(members: &[Stages]) -> f64 {
    let mut time = best(&mut members.to_vec(), 0);
    if let [(d0, c0, n0), (d1, c1, n1)] = *members {
        time = time.min(d0.max(c1 + n1) + d1.max(c0 + n0));
    }
    time *= [1.33, 1.50, 1.37][members.len() - 2] / 1.015;
    members.iter().fold(0.0, |sum, (d, c, n)| sum + (d + c + n)) / (time * 4.0)
}
