/** One value of a metric, as a registry of Prometheus' client wants it. */
export interface MetricValue {
  readonly labels: Readonly<Record<string, string>>
  readonly value: number
  readonly metricName?: string
}

export type MetricType = 'counter' | 'gauge' | 'histogram'

interface RegisteredMetric {
  readonly name: string
  readonly help: string
  readonly type: MetricType
  readonly aggregator: 'sum'
  get(): Promise<{ name: string; help: string; type: MetricType; values: MetricValue[] }>
}

/** Where metrics are registered: a `Registry` of prom-client or @prometheus-io/client fits. It gets a RegisteredMetric. */
export interface MetricRegistry {
  registerMetric(metric: never): void
}

/**
 * Counters and histograms for the hot path. The client library validates and hashes the labels on each call: 150 ns a
 * counter, 300 ns a histogram, and one request makes about ten such calls. Here a child is looked up once and is then a
 * plain number (1 ns and 15 ns); the registry only reads the values at a scrape.
 *
 * Label sets are bounded: after `childrenMax` of them, all further ones share a child whose labels are all "other".
 */
interface FamilyOptions<L extends string> {
  readonly registry: MetricRegistry
  readonly name: string
  readonly help: string
  readonly labelNames: readonly L[]
  /** Maximum number of label sets. Default 200. */
  readonly childrenMax?: number
}

type Labels = Readonly<Record<string, string>>
/** One value per label name, in their order. */
type LabelTuple<N extends readonly string[]> = { readonly [K in keyof N]: string }

export const otherLabel = 'other'
const childrenMaxDefault = 200

abstract class Family<N extends readonly string[], Child> {
  readonly #labelNames: readonly string[]
  readonly #childrenMax: number
  readonly #byKey = new Map<string, Child>()
  protected readonly children: { readonly labels: Labels; readonly child: Child }[] = []
  #other: Child | undefined

  constructor(labelNames: N, childrenMax: number) {
    this.#labelNames = labelNames
    this.#childrenMax = childrenMax
  }

  protected abstract makeChild(): Child

  /** The child of these label values. Callers on the hot path keep it; looking it up by three labels costs 150 ns. */
  labels(...values: LabelTuple<N>): Child {
    // Joined by NUL, which none of our label values contains: names come from a closed set or are checked on the wire.
    const key = values.length === 1 ? (values[0] ?? '') : values.join('\0')
    return this.#byKey.get(key) ?? this.#addChild(key, values)
  }

  #addChild(key: string, values: readonly string[]): Child {
    if (this.#byKey.size >= this.#childrenMax) {
      this.#other ??= this.#keepChild(this.#labelNames.map(() => otherLabel))
      return this.#other
    }
    const child = this.#keepChild(values)
    this.#byKey.set(key, child)
    return child
  }

  #keepChild(values: readonly string[]): Child {
    const child = this.makeChild()
    this.children.push({
      labels: Object.fromEntries(this.#labelNames.map((name, index) => [name, values[index] ?? ''])),
      child,
    })
    return child
  }
}

/** The registry only reads a metric's name and values; the library's own aggregation registers such objects too. */
export function register(
  options: Pick<FamilyOptions<string>, 'registry' | 'name' | 'help'>,
  type: MetricType,
  values: () => MetricValue[],
): void {
  const { name, help } = options
  const get = async () => ({ name, help, type, values: values() })
  const metric: RegisteredMetric = { name, help, type, aggregator: 'sum', get }
  options.registry.registerMetric(metric as never)
}

export class CounterChild {
  value = 0

  inc(by = 1): void {
    this.value += by
  }
}

export class CounterFamily<const N extends readonly string[]> extends Family<N, CounterChild> {
  constructor(options: FamilyOptions<N[number]> & { readonly labelNames: N }) {
    super(options.labelNames, options.childrenMax ?? childrenMaxDefault)
    register(options, 'counter', () => this.children.map(({ labels, child }) => ({ labels, value: child.value })))
  }

  protected override makeChild(): CounterChild {
    return new CounterChild()
  }
}

export class HistogramChild {
  readonly #bounds: readonly number[]
  /** One more than there are bounds: the last is for values above all of them. */
  readonly counts: Float64Array
  sum = 0

  constructor(bounds: readonly number[]) {
    this.#bounds = bounds
    this.counts = new Float64Array(bounds.length + 1)
  }

  observe(value: number): void {
    const bounds = this.#bounds
    let index = 0
    // Linear: most observations fall in the first few buckets, and there are at most 16.
    while (index < bounds.length && value > (bounds[index] ?? Number.POSITIVE_INFINITY)) index++
    this.counts[index] = (this.counts[index] ?? 0) + 1
    this.sum += value
  }
}

export class HistogramFamily<const N extends readonly string[]> extends Family<N, HistogramChild> {
  readonly #bounds: readonly number[]

  /** `buckets`: upper bounds, ascending. */
  constructor(options: FamilyOptions<N[number]> & { readonly labelNames: N; readonly buckets: readonly number[] }) {
    super(options.labelNames, options.childrenMax ?? childrenMaxDefault)
    this.#bounds = options.buckets
    register(options, 'histogram', () =>
      this.children.flatMap(({ labels, child }) => this.#export(options.name, labels, child)),
    )
  }

  protected override makeChild(): HistogramChild {
    return new HistogramChild(this.#bounds)
  }

  #export(name: string, labels: Labels, child: HistogramChild): MetricValue[] {
    let count = 0
    const buckets = Array.from(child.counts, (inBucket, index) => {
      count += inBucket
      const le = index < this.#bounds.length ? String(this.#bounds[index]) : '+Inf'
      return { metricName: `${name}_bucket`, labels: { ...labels, le }, value: count }
    })
    return [
      ...buckets,
      { metricName: `${name}_sum`, labels, value: child.sum },
      { metricName: `${name}_count`, labels, value: count },
    ]
  }
}

export class GaugeChild {
  value = 0

  set(value: number): void {
    this.value = value
  }
}

export class GaugeFamily<const N extends readonly string[]> extends Family<N, GaugeChild> {
  constructor(options: FamilyOptions<N[number]> & { readonly labelNames: N }) {
    super(options.labelNames, options.childrenMax ?? childrenMaxDefault)
    register(options, 'gauge', () => this.children.map(({ labels, child }) => ({ labels, value: child.value })))
  }

  protected override makeChild(): GaugeChild {
    return new GaugeChild()
  }
}
