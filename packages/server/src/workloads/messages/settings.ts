import type { Setting } from '../../config/setting.js'

export const messageSettings = {
  pushPendingMax: {
    name: 'SPILLWAY_PUSH_PENDING_MAX',
    type: 'integer',
    min: 1,
    max: 100_000_000,
    default: 10_000,
    unit: 'operations',
    meaning: 'operations that may wait; a push that would have to join more is answered 429',
  },
  groupsMax: {
    name: 'SPILLWAY_GROUPS_PER_QUEUE_MAX',
    type: 'integer',
    min: 1,
    max: 100_000,
    default: 1_000,
    unit: 'groups',
    meaning: 'consumer groups that a queue may have; a pop of one more is answered 409',
  },
  encryptionKey: {
    name: 'SPILLWAY_ENCRYPTION_KEY',
    type: 'text',
    pattern: /^[0-9a-f]{64}$/iu,
    allowed: '64 hexadecimal digits (32 bytes), e.g. from: openssl rand -hex 32',
    default: null,
    secret: true,
    meaning: 'key of queues with encryptionEnabled (AES-256-GCM); the same on every instance',
  },
} as const satisfies Readonly<Record<string, Setting>>
