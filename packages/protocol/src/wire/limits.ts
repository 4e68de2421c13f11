/** Every limit has a name and a unit; schemas, parsers and docs take it from here. */
export const limits = {
  bodyBytes: 1_048_576,
  nestingDepth: 64,
  nameCodePoints: 255,
  idempotencyKeyCharacters: 255,
  preferWaitSecondsMax: 60,
  listItemsMax: 200,
  listEntriesMax: 1_000,
  /** Lists include a payload, result or text up to this size; a longer one is left out. */
  listPayloadBytes: 4_096,
  /** The items of one page, as JSON: the default and the minimum of SPILLWAY_PAGE_BYTES_MAX. */
  pageBytes: 4_194_304,
  pageBytesMin: 65_536,
  priorityMin: 1,
  priorityMax: 10,
  delaySecondsMax: 31_536_000,
  timeoutSecondsMax: 3_600,
  maxRetriesMax: 100,
  forwardAnswerBytes: 65_536,
  forwardUrlCharacters: 8_192,
  forwardHeaders: 64,
  forwardHeaderValueCharacters: 8_192,
  forwardRedirects: 5,
  demoDelayMsMax: 60_000,
  identityCharacters: 255,
  petitionTextCodePoints: 10_000,
  realmCodePoints: 100,
  reasonCodePoints: 1_000,
  pushBodyBytes: 8_388_608,
  pushItemsMax: 1_000,
  popMessagesMax: 1_000,
  popPartitionsMax: 1_000,
  popWaitMsMax: 120_000,
  ackItemsMax: 1_000,
  ackErrorCharacters: 10_000,
  transactionOperationsMax: 1_000,
  leaseSecondsMax: 86_400,
  chatBodyBytes: 16_777_216,
} as const

/** Lower first. The names are those of the messages workload and of background work. */
export const priorities = {
  SYSTEM_EVENT: 1,
  ACK_BATCH: 3,
  ACK_SINGLE: 4,
  PUSH: 5,
  POP: 6,
  BACKGROUND_JOB: 8,
  ANALYTICS: 10,
} as const

export const defaultPriority = priorities.PUSH
export const defaultPartition = 'Default'
